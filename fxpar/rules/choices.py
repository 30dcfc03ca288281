"""What a mesh axis may do to one op call: from a rule's groups and the operands' logical dims to choices.

``factors_on_atoms`` lays the groups over the atoms: an atom that fills the same interval of the loop in every operand
is a factor; anything else stays whole at this op. A :class:`Choice` is what ONE axis does: nothing (``"."``), split a
factor (``"f2"``), split a run of adjacent factors (``"f2+2"``), or pass a pending sum (``"p0"``). Choices of several
axes combine freely as long as no two cut overlapping, unequal runs of an operand.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from fxpar.plans.layout import (
    PARTIAL_SUM,
    REPLICATE,
    Dims,
    Layout,
    Partial,
    Placement,
    Shard,
    chunk,
    valid_layout,
)
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Node, Program, node_inputs
from fxpar.rules.factor_rule import Call, Factors, Group, Linear, Slot, call_of
from fxpar.rules.registry import rule_cache, rule_for

Position = tuple[int, int]
"""(tensor dim, atom index)."""


@dataclass(frozen=True)
class Site:
    """A call together with the logical dims of its operands and outputs: all that its choices depend on."""

    call: Call
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]

    def __hash__(self) -> int:
        """Computed once: sites are deep and looked up for every node of every plan that is weighed."""
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash((self.call, self.inputs, self.outputs))
            object.__setattr__(self, "_hash", known)
        return int(known)

    def __reduce__(self) -> tuple[type[Site], tuple[object, ...]]:
        return Site, (self.call, self.inputs, self.outputs)  # a hash is of its own process


@dataclass(frozen=True)
class Factor:
    """One splittable loop of a site: its atom in each operand, or None; of a loose group the first atom of its dim."""

    size: int
    inputs: tuple[Position | None, ...]
    outputs: tuple[Position | None, ...]
    group: Group


@dataclass(frozen=True)
class Choice:
    """What one axis does: the placement it gives every operand and output; ``expands`` as in ``Group``."""

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    size: int = 0
    nonempty: bool = False
    expands: str = ""


def site_of(node: Node, program: Program) -> Site:
    """The node's site in a program with logical dims."""
    return Site(
        call_of(node, program),
        tuple(program.dims[v] for v in node_inputs(node)),
        tuple(None if v < 0 else program.dims[v] for v in node.outputs),
    )


# The latest program's: all plans of a search are of one program.
_latest: list[tuple[Program, tuple[Site, ...]]] = []


def sites_of(program: Program) -> tuple[Site, ...]:
    """The sites of all nodes; equal ones are one object."""
    if not _latest or _latest[0][0] is not program:
        one: dict[Site, Site] = {}
        sites = tuple(one.setdefault(site, site) for site in (site_of(node, program) for node in program.nodes))
        _latest[:] = [(program, sites)]
    return _latest[0][1]


@rule_cache(100_000)
def call_factors(call: Call) -> Factors:
    """The rule's groups for a call; no groups for an op that has only the default rule."""
    declared = rule_for(call.op)
    if declared is None:
        return Factors()
    factors = declared.factors(call)
    return Factors(factors.groups, tuple(entry for entry in factors.linear if keeps_sums(call, entry)))


def keeps_sums(call: Call, linear: Linear) -> bool:
    """True when pending sums lose nothing: floating values that no output holds in a narrower dtype."""
    given = [getattr(torch, call.inputs[o].dtype) for o in linear.inputs]
    made = [getattr(torch, out.dtype) for o in linear.outputs if (out := call.outputs[o]) is not None]
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in (*given, *made)):
        return False
    real_widths = [(d.itemsize // 2 if d.is_complex else d.itemsize) for d in given]
    return all((d.itemsize // 2 if d.is_complex else d.itemsize) >= max(real_widths, default=0) for d in made)


def slot_intervals(slot: Slot, size: int, dims: Dims) -> dict[tuple[int, int], Position]:
    """Atoms that lie inside the slot, keyed by their interval of prefix products relative to the group."""
    found: dict[tuple[int, int], Position] = {}
    prefix = 1
    for dim in slot.dims:
        for index, atom in enumerate(dims[dim]):
            low, high = prefix, prefix * atom
            # the atom must nest in the region: its stride and its end are whole there
            if low % slot.lead == 0 and size % max(high // slot.lead, 1) == 0 and low >= slot.lead:
                found[(low // slot.lead, high // slot.lead)] = (dim, index)
            prefix = high
    return found


@rule_cache(100_000)
def factors_on_atoms(site: Site) -> tuple[Factor, ...]:
    """Factors of a site, group by group, major first."""
    result = []
    for group in call_factors(site.call).groups:
        slots = [(s, d) for s, d in zip((*group.inputs, *group.outputs), (*site.inputs, *site.outputs), strict=True)]
        if group.loose:
            result += _loose_factor(group, slots)
            continue
        maps = [slot_intervals(s, group.size, d) if s is not None and d is not None else None for s, d in slots]
        present = [m for m in maps if m is not None]
        common = [key for key in (present[0] if present else {}) if all(key in m for m in present)]
        for key in sorted(common):
            places = [m[key] if m is not None else None for m in maps]
            k = len(group.inputs)
            result.append(Factor(key[1] // key[0], tuple(places[:k]), tuple(places[k:]), group))
    return tuple(result)


def _loose_factor(group: Group, slots: list[tuple[Slot | None, Dims | None]]) -> list[Factor]:
    """The factor of a loop over whole dims; none when some of them cannot be cut."""
    places: list[Position | None] = []
    sizes = []
    for slot, dims in slots:
        if slot is None or dims is None:
            places.append(None)
            continue
        places.append((slot.dims[0], 0))
        sizes.append(math.prod(dims[slot.dims[0]]))
    k = len(group.inputs)
    return [Factor(min(sizes), tuple(places[:k]), tuple(places[k:]), group)] if min(sizes, default=1) > 1 else []


def _split(site: Site, run: tuple[Factor, ...], name: str) -> Choice:
    group, n = run[0].group, len(run)

    def shard(position: Position | None, dims: Dims | None) -> Shard | None:
        if position is None or dims is None:
            return None
        return Shard(position[0], position[1], len(dims[position[0]]) if group.loose else n)

    inputs: list[Placement] = []
    for operand, (position, dims) in enumerate(zip(run[0].inputs, site.inputs, strict=True)):
        inputs.append(shard(position, dims) or (PARTIAL_SUM if operand in group.addends else REPLICATE))
    outputs: list[Placement] = []
    for position, made, reduce in zip(run[0].outputs, site.outputs, group.contract, strict=True):
        outputs.append(shard(position, made) or (Partial(reduce) if reduce else REPLICATE))  # type: ignore[arg-type]
    size = math.prod(f.size for f in run)
    return Choice(name, tuple(inputs), tuple(outputs), size, group.nonempty, group.expands)


def _adjacent(a: Factor, b: Factor) -> bool:
    """True when ``b`` follows ``a`` directly inside one dim of every operand that carries them."""
    if a.group is not b.group or a.group.loose:
        return False
    pairs = zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True)
    return all(x is None or (y is not None and x[0] == y[0] and x[1] + 1 == y[1]) for x, y in pairs)


@rule_cache(100_000)
def axis_choices(site: Site) -> tuple[Choice, ...]:
    """Every choice of one axis at a site: ``"."`` first, then factors, whole-group runs, pending sums."""
    none = Choice(".", (REPLICATE,) * len(site.inputs), (REPLICATE,) * len(site.outputs))
    result = [none]
    factors = factors_on_atoms(site)
    result += [_split(site, (f,), f"f{i}") for i, f in enumerate(factors)]
    start = 0
    for i in range(1, len(factors) + 1):
        if i == len(factors) or not _adjacent(factors[i - 1], factors[i]):
            if i - start > 1:
                result.append(_split(site, factors[start:i], f"f{start}+{i - start}"))
            start = i
    for i, linear in enumerate(call_factors(site.call).linear):
        result.append(
            Choice(
                f"p{i}",
                tuple(PARTIAL_SUM if o in linear.inputs else REPLICATE for o in range(len(site.inputs))),
                tuple(PARTIAL_SUM if o in linear.outputs else REPLICATE for o in range(len(site.outputs))),
            )
        )
    return tuple(result)


@dataclass(frozen=True)
class JointChoice:
    """What all mesh axes together do at a site; ``expands`` per axis as in ``Group``, empty when no axis does."""

    names: tuple[str, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    expands: tuple[str, ...] = ()


def combine(site: Site, choices: tuple[Choice, ...], mesh: Mesh) -> JointChoice | None:
    """The joint choice, None when two axes cut overlapping runs or a loop that must not be empty would be."""
    inputs = tuple(tuple(c.inputs[i] for c in choices) for i in range(len(site.inputs)))
    outputs = tuple(tuple(c.outputs[o] for c in choices) for o in range(len(site.outputs)))
    if not all(valid_layout(layout, dims) for layout, dims in zip(inputs, site.inputs, strict=True)):
        return None
    if not all(d is None or valid_layout(layout, d) for layout, d in zip(outputs, site.outputs, strict=True)):
        return None
    if not _same_loop_ok(choices):
        return None
    if any(c.nonempty for c in choices):
        for choice in choices:
            sizes = [n for c, n in zip(choices, mesh.sizes, strict=True) if c.name == choice.name]
            if choice.nonempty and smallest_piece(choice.size, tuple(sizes)) == 0:
                return None
    words = tuple(c.expands for c in choices) if any(c.expands for c in choices) else ()
    if words:
        declared = rule_for(site.call.op)
        if declared is None or declared.expand is None:
            return None
        if declared.offers is not None and not declared.offers(site.call, words, mesh.sizes):
            return None
    return JointChoice(tuple(c.name for c in choices), inputs, outputs, words)


def _same_loop_ok(choices: tuple[Choice, ...]) -> bool:
    """Two axes may not cut a loop and a run that contains it: operands that lack one of them would not show it."""
    spans = [_span(c.name) for c in choices]
    cut = [s for s in spans if s is not None]
    return all(a == b or a[1] <= b[0] or b[1] <= a[0] for a, b in itertools.combinations(cut, 2))


def _span(name: str) -> tuple[int, int] | None:
    if not name.startswith("f"):
        return None
    first, _, length = name[1:].partition("+")
    return int(first), int(first) + int(length or 1)


def smallest_piece(size: int, parts: tuple[int, ...]) -> int:
    """Length of the smallest piece when ``size`` is cut by nested chunks of ``parts``."""
    lengths = {size}
    for n in parts:
        lengths = {chunk(0, length, n, i)[1] for length in lengths for i in range(n)}
    return min(lengths)


@rule_cache(100_000)
def joint_choices(site: Site, mesh: Mesh) -> tuple[JointChoice, ...]:
    """All joint choices of a site on a mesh, in a fixed order (all-replicated first)."""
    per_axis = axis_choices(site)
    combos = itertools.product(per_axis, repeat=len(mesh.axes))
    return tuple(j for c in combos if (j := combine(site, c, mesh)) is not None)


def choice_by_names(site: Site, names: tuple[str, ...], mesh: Mesh) -> JointChoice | None:
    """The joint choice a plan names, None when the rule offers no such choice here."""
    table = {c.name: c for c in axis_choices(site)}
    if len(names) != len(mesh.axes) or any(n not in table for n in names):
        return None
    return combine(site, tuple(table[n] for n in names), mesh)
