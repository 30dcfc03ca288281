"""What a user asks of a plan beyond mesh and memory, as filters over stored layouts and choices.

ZeRO stages, on every mesh axis but those called tp (optimizer state and gradients always lie as the parameter is
stored, and gradients are reduced as they are made):

    0     parameters are stored whole
    1, 2  stored cut wherever they can be; a copy gathered for forward is kept until backward has read it
    3     stored cut, too; backward gathers again (``Decisions.reuse`` is empty)

1 and 2 differ in when gradients are reduced, which with one microbatch is the same. Pins (:mod:`fxpar.pins`) say what
axes do to inputs and ops of a name. The more particular demand counts: where a pin says what an axis does, neither the
axis' name nor the stage says anything. Layers that are decided together obey what is asked of any of them.

In: constraints, a program with logical dims, a mesh. Out: filters for :func:`fxpar.formulate.formulate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fxpar.formulate import InputFilter, NodeFilter, useful
from fxpar.layers import Classes, tie_layers
from fxpar.lifetimes import keepable
from fxpar.minimal_set import minimal_set
from fxpar.modes import Reuse
from fxpar.pin_targets import matched
from fxpar.pins import Pin, Wanted, parse_pins
from fxpar.plans.errors import FxparError, Infeasible, collect_errors
from fxpar.plans.layout import REPLICATE, Layout, Partial, Shard, layout_text
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, node_inputs
from fxpar.restrict import Restriction
from fxpar.rules.choices import JointChoice, Site, choice_by_names, joint_choices
from fxpar.splits import Named, cut_factors
from fxpar.stored import stored_layouts

SHOWN = 6
"""Names or choices that an error lists."""


@dataclass(frozen=True)
class Constraints:
    """``zero``: a ZeRO stage, None: every parameter is stored as is best. ``pins``: see :mod:`fxpar.pins`."""

    zero: int | None = None
    pins: tuple[Pin, ...] = ()

    def __bool__(self) -> bool:
        return self.zero is not None or bool(self.pins)

    @property
    def reuse(self) -> Reuse:
        """Which gathered copies of parameters are kept from forward to backward."""
        return "free" if not self.zero else "never" if self.zero == 3 else "always"

    @property
    def texts(self) -> tuple[str, ...]:
        """Each as on the command line."""
        zero = () if self.zero is None else (f"--zero {self.zero}",)
        return (*zero, *(f"--pin '{pin.text}'" for pin in self.pins))


UNCONSTRAINED = Constraints()


def read_constraints(zero: int | None, pins: Sequence[str]) -> Constraints:
    """Constraints from the command line, or from a certificate's question.

    Raises:
        FxparError: there is no such stage, or a pin cannot be read.
    """
    if zero not in (None, 0, 1, 2, 3):
        raise FxparError(f"there is no ZeRO stage {zero}", where="--zero", way_out="stages are 0, 1, 2 and 3")
    return Constraints(zero, parse_pins(pins))


@dataclass(frozen=True)
class Demand:
    """What pin number ``pin`` asks of one axis at one class: ``dim`` is counted from the front, ``output`` says which
    result of an op is meant; ``cut`` holds the factors of an op, or the (dim, atom) of an input, of which a split must
    cut one."""

    pin: int
    axis: int
    wanted: Wanted
    dim: int = 0
    output: int = 0
    cut: frozenset[int | tuple[int, int]] = frozenset()

    def obeyed_by(self, state: JointChoice | Layout) -> bool:
        """True when a choice of an op, or a stored layout, does what is asked."""
        if isinstance(state, JointChoice):
            name, placement = state.names[self.axis], state.outputs[self.output][self.axis]
            if self.wanted.kind == "whole":
                return name == "."
            if self.wanted.kind == "split":
                return not self.cut.isdisjoint(cut_factors(name))
        else:
            placement = state[self.axis]
        match self.wanted.kind:
            case "shard":
                return isinstance(placement, Shard) and placement.dim == self.dim
            case "split":
                return isinstance(placement, Shard) and any(
                    (placement.dim, atom) in self.cut
                    for atom in range(placement.first, placement.first + placement.length)
                )
            case "partial":
                return isinstance(placement, Partial)
            case _:
                return placement == REPLICATE


@dataclass(frozen=True, eq=False)
class Applied:
    """Constraints on one mesh; ``demands``: per class of ops and inputs (ids of ``classes``) what pins ask of it."""

    constraints: Constraints
    program: Program
    mesh: Mesh
    classes: Classes
    demands: dict[int, tuple[Demand, ...]]

    def nodes(self, index: int, site: Site, choices: Sequence[JointChoice]) -> Sequence[JointChoice]:
        """The choices of an op that obey the pins."""
        demands = self.demands.get(self.classes.nodes[index])
        return [c for c in choices if all(d.obeyed_by(c) for d in demands)] if demands else choices

    def inputs(self, index: int, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """The stored layouts of an input that obey the pins, and the ZeRO stage where no pin says anything."""
        demands = self.demands.get(self.classes.inputs[index], ())
        layouts = [lay for lay in layouts if all(d.obeyed_by(lay) for d in demands)] if demands else layouts
        zero = self.constraints.zero
        if zero is None or self.program.inputs[index].kind != "parameter":
            return layouts
        pinned = {d.axis for d in demands}
        for axis, of in enumerate(self.mesh.axes):
            if of.name != "tp" and axis not in pinned:
                cut = [lay for lay in layouts if isinstance(lay[axis], Shard)]
                # what has no dim to cut is whole under any stage
                layouts = (cut or layouts) if zero else [lay for lay in layouts if lay[axis] == REPLICATE]
        return layouts

    def obeyed(self, decisions: Decisions) -> bool:
        """True when decisions on this mesh are what the constraints ask for."""
        if not self._copies_obey(decisions):
            return False
        for index, (c, names) in enumerate(zip(self.classes.nodes, decisions.choices, strict=True)):
            if c in self.demands:
                site = self.classes.sites[index]
                choice = choice_by_names(site, names, self.mesh)
                if choice is None or not self.nodes(index, site, [choice]):
                    return False
        stored = enumerate(decisions.inputs)
        return all(layout in self.inputs(index, self._stored(index)) for index, layout in stored)

    def _copies_obey(self, decisions: Decisions) -> bool:
        """True when copies of parameters live as long as the ZeRO stage says."""
        reuse = self.constraints.reuse
        if reuse != "always":
            return reuse == "free" or not decisions.reuse
        nodes = self.program.nodes
        layouts = {i.value: lay for i, lay in zip(self.program.inputs, decisions.inputs, strict=True)}
        for node, site, names in zip(nodes, self.classes.sites, decisions.choices, strict=True):
            choice = choice_by_names(site, names, self.mesh)
            if choice is not None:
                layouts.update({v: lay for v, lay in zip(node.outputs, choice.outputs, strict=True) if v >= 0})
        kept = set(decisions.reuse)
        return all(
            late in kept or layouts.get(nodes[early].outputs[0]) == layouts.get(node_inputs(nodes[early])[0])
            for late, early in keepable(self.program, self.classes).items()
        )

    def check_possible(self) -> None:
        """Look at every op and input that is pinned, each for itself.

        Raises:
            Infeasible: pins leave one no choice; names as few of them as do, and what they do to the others.
        """
        found: dict[tuple[int, ...], Infeasible] = {}
        for c, what, states in self._pinned_states():
            demands = self.demands[c]

            def possible(
                pins: tuple[int, ...], demands: tuple[Demand, ...] = demands,
                states: Sequence[JointChoice | Layout] = states,
            ) -> bool:
                return any(all(d.obeyed_by(s) for d in demands if d.pin in pins) for s in states)

            pins = tuple(dict.fromkeys(d.pin for d in demands))
            if not possible(pins):
                blamed = minimal_set(pins, possible)
                found.setdefault(blamed, self._no_choice(blamed, what, states))
        if found:
            first, *others = found.values()
            raise Infeasible(first.what, first.where, (*first.numbers, *(other.what for other in others)),
                             first.way_out)

    def _stored(self, index: int) -> Sequence[Layout]:
        item = self.program.inputs[index]
        return stored_layouts(item, self.program.dims[item.value], self.mesh)

    def _pinned_states(self) -> Iterator[tuple[int, str, Sequence[JointChoice | Layout]]]:
        """(class, its first member in words, what it may do without pins), of every class that is pinned."""
        seen: set[int] = set()
        for index, c in enumerate(self.classes.inputs):
            if c in self.demands and c not in seen:
                seen.add(c)
                item = self.program.inputs[index]
                yield c, f"{item.kind} {item.name}", self._stored(index)
        for index, c in enumerate(self.classes.nodes):
            if c in self.demands and c not in seen:
                seen.add(c)
                site, node = self.classes.sites[index], self.program.nodes[index]
                where = f" in {node.module}" if node.module else ""
                yield c, f"{node.op}{where}", useful(site, joint_choices(site, self.mesh), self.mesh)

    def _no_choice(self, pins: Sequence[int], what: str, states: Sequence[JointChoice | Layout]) -> Infeasible:
        texts = [f"--pin '{self.constraints.pins[p].text}'" for p in pins]
        offered = [layout_text(s.outputs[0] if isinstance(s, JointChoice) else s) for s in states]
        known = list(dict.fromkeys(offered))
        more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
        return Infeasible(
            f"{' and '.join(texts)} {'leave' if len(texts) > 1 else 'leaves'} no choice for {what}",
            where=f"mesh {self.mesh}", numbers=f"offered there: {', '.join(known[:SHOWN])}{more}",
            way_out="drop one of the pins" if len(texts) > 1 else "ask for what is offered, or drop the pin",
        )


def apply(constraints: Constraints, program: Program, mesh: Mesh, named: Named) -> Applied:
    """Constraints on a mesh.

    Args:
        named: the program's logical dims by name (:func:`fxpar.splits.named_dims`).

    Raises:
        FxparError: a pattern matches nothing, an axis is not in the mesh, a dim is not in a tensor, or no op or input
            that matches has a logical dim of the name; all such pins are named.
    """
    classes = tie_layers(program)
    found: dict[int, list[Demand]] = defaultdict(list)
    with collect_errors() as errors:
        for number, pin in enumerate(constraints.pins):
            with errors.catching():
                for c, demand in _demands(number, pin, program, mesh, named, classes):
                    if demand not in found[c]:
                        found[c].append(demand)
    return Applied(constraints, program, mesh, classes, {c: tuple(demands) for c, demands in found.items()})


def _demands(
    number: int, pin: Pin, program: Program, mesh: Mesh, named: Named, classes: Classes
) -> Iterator[tuple[int, Demand]]:
    """(class, demand) of everything that a pin names."""
    where = f"--pin '{pin.text}'"
    axes = pin.on(mesh)
    if axes is None:
        names = ", ".join(axis.name for axis in mesh.axes)
        raise FxparError(f"{where} does not fit the mesh", numbers=f"the axes of mesh {mesh} are {names}",
                         way_out="name axes of the mesh, or give one placement for each of them")
    targets = matched(program, pin.pattern)
    for axis, wanted in axes.items():
        if wanted.kind == "split":
            yield from _splits(Demand(number, axis, wanted), pin, program, named, classes)
            continue
        if wanted.kind == "partial" and targets.inputs:
            name = program.inputs[targets.inputs[0]].name
            raise FxparError(f"{where}: {name} cannot be stored as Partial", way_out="Replicate or Shard(DIM)")
        for i in targets.inputs:
            item = program.inputs[i]
            dim = _dim_of(wanted, len(program.dims[item.value]), item.name, where)
            yield classes.inputs[i], Demand(number, axis, wanted, dim)
        for n in targets.computing if wanted.kind == "whole" else targets.results:
            node = program.nodes[n]
            output = next((o for o, v in enumerate(node.outputs) if v >= 0), 0)
            rank = len(program.dims[node.outputs[output]])
            dim = _dim_of(wanted, rank, f"the result of {node.op} in {node.module or 'the model'}", where)
            yield classes.nodes[n], Demand(number, axis, wanted, dim, output)


def _splits(
    demand: Demand, pin: Pin, program: Program, named: Named, classes: Classes
) -> Iterator[tuple[int, Demand]]:
    """(class, demand) of the ops or inputs of a pin that have the logical dim it names."""
    targets = matched(program, pin.pattern)
    known: set[str] = set()
    some = False
    for i in targets.inputs:
        rows = named.classes.of_atom[program.inputs[i].value]
        names = {(d, a): named.names[number] for d, row in enumerate(rows) for a, number in enumerate(row)}
        places = frozenset(place for place, name in names.items() if name == demand.wanted.name)
        known.update(names.values())
        if places:
            some = True
            yield classes.inputs[i], replace(demand, cut=places)
    for n in targets.computing:
        loops = [named.names[number] for number in named.classes.of_factor[n]]
        factors = frozenset(f for f, name in enumerate(loops) if name == demand.wanted.name)
        known.update(loops)
        if factors:
            some = True
            yield classes.nodes[n], replace(demand, cut=factors)
    if not some:
        raise FxparError(
            f"--pin '{pin.text}': nothing that {pin.pattern!r} names has a logical dim called {demand.wanted.name}",
            numbers=f"logical dims there: {', '.join(sorted(known)) or 'none'}",
            way_out="name one of them, or a placement: Replicate, Shard(DIM), Partial, whole",
        )


def _dim_of(wanted: Wanted, rank: int, what: str, where: str) -> int:
    if wanted.kind != "shard":
        return 0
    dim = wanted.dim + rank if wanted.dim < 0 else wanted.dim
    if not 0 <= dim < rank:
        raise FxparError(f"{where}: {what} has no dim {wanted.dim}", numbers=f"it has {rank} dims",
                         way_out="name a dim that everything the pattern matches has, or make the pattern narrower")
    return dim


def filters(
    restriction: Restriction | None, applied: Applied | None
) -> tuple[NodeFilter | None, InputFilter | None]:
    """Filters of named axes and of constraints together: where a pin speaks of an axis, the axis' name does not."""
    if applied is None or not applied.constraints:
        return (None, None) if restriction is None else (restriction.nodes, restriction.inputs)
    if restriction is None:
        return applied.nodes, applied.inputs

    def named_axes(c: int) -> Restriction:
        pinned = {d.axis for d in applied.demands.get(c, ())}
        roles = tuple("" if axis in pinned else role for axis, role in enumerate(restriction.roles))
        return replace(restriction, roles=roles) if pinned else restriction

    def nodes(index: int, site: Site, choices: Sequence[JointChoice]) -> Sequence[JointChoice]:
        choices = applied.nodes(index, site, choices)
        return named_axes(applied.classes.nodes[index]).nodes(index, site, choices)

    def inputs(index: int, layouts: Sequence[Layout]) -> Sequence[Layout]:
        layouts = applied.inputs(index, layouts)
        return named_axes(applied.classes.inputs[index]).inputs(index, layouts)

    return nodes, inputs
