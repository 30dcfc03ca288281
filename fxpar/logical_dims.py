"""Logical dims: where every tensor dim of a program may be cut, so that a reshape never forces communication.

Goes in: a program. Comes out: the same program with ``dims`` filled: per value and tensor dim its atoms, major first.
``[b*s, d]`` becomes ``((b, s), (d,))``, a query projection weight ``((kv, rep, e), (d,))``.

How. A dim is a *variable*; cutting it at ``p`` means: the first ``p`` outer blocks, then the rest (a prefix product).
The groups of the rules (:mod:`fxpar.rules.factor_rule`) say which regions of an op's operands are walked by one loop:

    one whole dim each       [m, k] x [k, n]           both are one variable (union)
    anything else            [b, s, d] -> [b*s, d]     a border or cut inside one region cuts the others there too

The second kind is run to its least fixpoint: cuts only ever appear, and there are finitely many divisors, so it ends,
and the result does not depend on the order of the nodes. Where cuts do not nest (4 and 6 of a dim of 12) a chain is
kept per variable. Dropping a cut is always sound: an op splits only what its own operands agree on
(``factors_on_atoms``), so a lost cut costs a reshard, never a wrong number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from fxpar.plans.layout import Dims
from fxpar.plans.program import Program, node_inputs
from fxpar.rules.choices import call_factors
from fxpar.rules.factor_rule import Call, call_of
from fxpar.rules.registry import rule_cache
from fxpar.union_find import UnionFind


@dataclass(frozen=True)
class Region:
    """What a loop walks of one operand: its dims of size > 1, the ``lead`` outer elements left whole."""

    operand: int
    dims: tuple[int, ...]
    lead: int


@dataclass(frozen=True)
class Relation:
    """Regions (operands first, then outputs, numbered on) that one loop of ``size`` walks together.

    ``whole`` are the (operand, dim) that the loop fills entirely; ``regions`` all others. ``soft`` as in ``Group``.
    ``seeds``: the region's own borders are cut points. Not so when a slice merely shares a divisor with its operand
    (12 of 512 positions: blocks of 4): that would cut a sequence in two for nothing.
    """

    size: int
    whole: tuple[tuple[int, int], ...]
    regions: tuple[Region, ...]
    soft: bool
    seeds: bool


@rule_cache(100_000)
def relations(call: Call) -> tuple[Relation, ...]:
    """What the groups of a call say about its operands' dims; nothing for an op without a rule."""
    types = (*call.inputs, *call.outputs)
    found = []
    for group in call_factors(call).groups:
        if group.loose:  # whole dims of unlike lengths: nothing to cut
            continue
        whole, regions = [], []
        for operand, (slot, type_) in enumerate(zip((*group.inputs, *group.outputs), types, strict=True)):
            if slot is None or type_ is None:
                continue
            dims = tuple(d for d in slot.dims if type_.shape[d] > 1)
            if len(dims) == 1 and slot.lead == slot.trail == 1:
                whole.append((operand, dims[0]))
            else:
                regions.append(Region(operand, dims, slot.lead))
        if len(whole) + len(regions) > 1 or regions:
            seeds = bool(whole) or not group.soft
            found.append(Relation(group.size, tuple(whole), tuple(regions), group.soft, seeds))
    return tuple(found)


Side = tuple[int, tuple[tuple[int, int, int], ...]]
"""(lead, ((prefix before the dim, size of the dim, variable), ...))."""


Equality = tuple[int, bool, bool, tuple[Side, ...]]
"""(size, soft, seeds, sides): a relation over variables."""


class _Cuts:
    """The cut points of every variable, grown to the least fixpoint. ``True`` marks a cut that views force."""

    def __init__(self, equalities: Iterable[Equality]) -> None:
        self.equalities = list(equalities)
        self.of: dict[int, dict[int, bool]] = {}
        self.users: dict[int, list[int]] = {}
        for index, (*_, sides) in enumerate(self.equalities):
            for variable in {v for _, dims in sides for _, _, v in dims}:
                self.users.setdefault(variable, []).append(index)
                self.of.setdefault(variable, {})

    def run(self) -> None:
        waiting = deque(range(len(self.equalities)))
        queued = set(waiting)
        while waiting:
            index = waiting.popleft()
            queued.discard(index)
            for variable in self._apply(index):
                for user in self.users[variable]:
                    if user not in queued:
                        queued.add(user)
                        waiting.append(user)

    def _apply(self, index: int) -> set[int]:
        """Carry the cuts of every region of one equality into its other regions; the variables that grew."""
        size, soft, seeds, sides = self.equalities[index]
        points: dict[int, bool] = {1: True, size: True} if seeds else {}
        for lead, dims in sides:
            for prefix, _, variable in dims:
                for cut, hard in ((1, True), *self.of[variable].items()):
                    point, rest = divmod(prefix * cut, lead)
                    # a cut at `point` blocks of the loop; outside the loop or across its border it says nothing
                    if rest == 0 and 1 <= point <= size and size % point == 0:
                        points[point] = points.get(point, False) or hard
        grown = set()
        for lead, dims in sides:
            for point, hard in points.items():
                at = lead * point
                for prefix, extent, variable in dims:
                    if not prefix < at < prefix * extent:
                        continue
                    cut, rest = divmod(at, prefix)
                    if rest == 0 and extent % cut == 0:
                        known = self.of[variable].get(cut)
                        strong = hard and not soft
                        if known is None or (strong and not known):
                            self.of[variable][cut] = strong
                            grown.add(variable)
        return grown


def chain(cuts: dict[int, bool]) -> tuple[int, ...]:
    """Cuts that nest, ascending: those in conflict with none, then what views force, then the rest, small first.

    ``cuts`` maps a cut point to whether a view forces it.
    """

    def nest(a: int, b: int) -> bool:
        return a % b == 0 or b % a == 0

    conflicts = {a: sum(not nest(a, b) for b in cuts) for a in cuts}
    kept: list[int] = []
    for cut in sorted(cuts, key=lambda c: (conflicts[c] > 0, not cuts[c], conflicts[c], c)):
        if all(nest(cut, other) for other in kept):
            kept.append(cut)
    return tuple(sorted(kept))


def atoms_of(size: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Atoms of a dim of ``size`` cut at a divisibility chain: ``(12, (2, 4)) -> (2, 2, 3)``; size 0 is one atom."""
    if size == 0:
        return (0,)
    borders = (1, *cuts, size)
    return tuple(b // a for a, b in zip(borders, borders[1:], strict=False) if b > a)


def twins(program: Program) -> tuple[tuple[int, int], ...]:
    """(value that enters, value that leaves) pairs that live in one layout: a parameter and its gradient, a buffer
    and its new value, where the shapes are equal."""
    entering = {("parameter", n): i.value for i in program.inputs if i.kind == "parameter" for n in (i.name, *i.ties)}
    entering |= {("buffer", n): i.value for i in program.inputs if i.kind == "buffer" for n in (i.name, *i.ties)}
    pairs = []
    for output in program.outputs:
        kind = {"gradient": "parameter", "buffer": "buffer"}.get(output.kind, "")
        value = entering.get((kind, output.name))
        if value is not None and output.value >= 0:
            if program.types[value].shape == program.types[output.value].shape:
                pairs.append((value, output.value))
    return tuple(pairs)


def analyse(program: Program, order: Sequence[int] | None = None) -> Program:
    """The program with ``dims`` filled.

    Args:
        program: any program; what ``dims`` held before is not read.
        order: the order in which nodes are looked at (all of them, by index). It changes nothing but the time taken.
    """
    base = [0]
    for type_ in program.types:
        base.append(base[-1] + len(type_.shape))
    sizes = [size for type_ in program.types for size in type_.shape]
    union = UnionFind(len(sizes))
    for a, b in twins(program):
        for dim in range(len(program.types[a].shape)):
            union.join(base[a] + dim, base[b] + dim)

    flat: list[tuple[int, bool, bool, list[tuple[int, tuple[int, ...]]]]] = []
    for index in range(len(program.nodes)) if order is None else order:
        node = program.nodes[index]
        values = (*node_inputs(node), *node.outputs)
        for relation in relations(call_of(node, program)):
            whole = [base[values[operand]] + dim for operand, dim in relation.whole]
            for variable in whole[1:]:
                union.join(whole[0], variable)
            if relation.regions:
                sides = [(r.lead, tuple(base[values[r.operand]] + d for d in r.dims)) for r in relation.regions]
                sides += [(1, (whole[0],))] if whole else []
                flat.append((relation.size, relation.soft, relation.seeds, sides))

    equalities = dict.fromkeys((size, soft, seeds, _sides(sides, sizes, union)) for size, soft, seeds, sides in flat)
    cuts = _Cuts(equalities)
    cuts.run()
    kept = {variable: chain(found) for variable, found in cuts.of.items()}

    def atoms(variable: int) -> tuple[int, ...]:
        return atoms_of(sizes[variable], kept.get(union.find(variable), ()))

    dims: list[Dims] = [
        tuple(atoms(variable) for variable in range(base[value], base[value + 1]))
        for value in range(len(program.types))
    ]
    return msgspec.structs.replace(program, dims=tuple(dims))


def _sides(sides: list[tuple[int, tuple[int, ...]]], sizes: list[int], union: UnionFind) -> tuple[Side, ...]:
    """Regions with their variables united and the prefix before each dim; equal regions once."""
    result: dict[Side, None] = {}
    for lead, variables in sides:
        prefix, row = 1, []
        for variable in variables:
            row.append((prefix, sizes[variable], union.find(variable)))
            prefix *= sizes[variable]
        result[(lead, tuple(row))] = None
    return tuple(result)
