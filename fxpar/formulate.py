"""From a program, a mesh and prices to a numeric problem, and from an assignment back to decisions.

One variable per class of nodes (state: a joint choice, and for forward nodes, when recomputation is free, what becomes
of their results: see ``modes``) and per class of inputs (state: a stored layout). A node's own
cost is the time of its local op; every use of a value costs the reshard from the layout it is produced in to the one
the reader wants (a value with several readers goes through a hub, so a shared reshard is paid once); a gradient is
resharded to the layout its parameter is stored in. Memory: parameters, gradients and optimizer state of the stored
shard, every forward value that is kept for backward, and of what runs again one layer's worth.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fxpar.class_modes import ClassModes, add_activations, add_copies
from fxpar.edge_tables import EdgeFlags, EdgeTables
from fxpar.layers import Classes, tie_layers
from fxpar.lifetimes import keepable, pairs_allowed
from fxpar.memory_units import MEMORY_UNIT, units
from fxpar.modes import (
    AGAIN,
    DROPPED,
    HELD,
    KEPT,
    Copies,
    Pair,
    Part,
    Reuse,
    nodes_to_repeat,
    pinned_modes,
    times,
)
from fxpar.often import ALONE, InTime, Often
from fxpar.plans.errors import Infeasible
from fxpar.plans.layout import Dims, Layout, Partial, replicated
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, TensorType, node_inputs
from fxpar.precision import COMPUTE, reduced_early
from fxpar.prices import Prices
from fxpar.reshard_tables import PriceKind
from fxpar.rules.choices import JointChoice, Site, axis_choices, factors_on_atoms, joint_choices
from fxpar.rules.registry import rule_cache
from fxpar.solver.problem import FORBIDDEN, Edge, IntArray, Problem, Variable
from fxpar.sources import sources
from fxpar.stored import stored_layouts

NodeFilter = Callable[[int, Site, Sequence[JointChoice]], Sequence[JointChoice]]
"""(node index, site, choices) -> the choices that the user's request leaves."""
InputFilter = Callable[[int, Sequence[Layout]], Sequence[Layout]]
"""(input index, layouts) -> the stored layouts that the user's request leaves."""


@dataclass(frozen=True)
class Use:
    """What an edge brings along: output ``output`` of class ``owner``; ``kind``: what of it travels in buckets."""

    owner: int
    output: int
    kind: PriceKind


@dataclass(frozen=True, eq=False)
class Formulation:
    """A problem and what its states mean. Class ids are those of ``classes``; variables follow the same order.

    ``modes``: per class of nodes the mode of every state; empty when ``recompute`` was given. ``copies``: backward hub
    -> forward hub whose copy it may read, ``hub_modes``: the modes of the states of their classes. ``temporaries``: of
    :func:`with_temporaries`. ``uses``: per edge of the problem which value is brought along, None where none is.
    """

    program: Program
    mesh: Mesh
    classes: Classes
    node_states: dict[int, tuple[JointChoice, ...]]
    input_states: dict[int, tuple[Layout, ...]]
    problem: Problem
    recompute: tuple[int, ...] = ()
    modes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    hub_modes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reuse: Reuse = "never"
    temporaries: tuple[int, ...] = ()
    unit: int = MEMORY_UNIT
    uses: tuple[Use | None, ...] = ()
    in_time: InTime = ALONE

    def decisions(self, assignment: Sequence[int]) -> Decisions:
        """The decisions that an assignment stands for."""
        inputs = tuple(self.input_states[c][assignment[c]] for c in self.classes.inputs)
        recompute = self.recompute
        if self.modes:
            recompute = nodes_to_repeat(self.program, [self.modes[c][assignment[c]] for c in self.classes.nodes])
        of = self.classes.nodes
        reuse = tuple(sorted(b for b in self.copies if self.hub_modes[of[b]][assignment[of[b]]] == HELD
                             and self._holds(self.copies[b], assignment)))
        held = {self.copies[b] for b in reuse}
        return Decisions(
            self.mesh,
            tuple(self.node_states[c][assignment[c]].names for c in self.classes.nodes),
            inputs,
            output_layouts(self.program, inputs, self.mesh),
            tuple(n for n in recompute if n not in held),
            reuse,
            *self.in_time.decided(self.program),
        )

    def _holds(self, hub: int, assignment: Sequence[int]) -> bool:
        c = self.classes.nodes[hub]
        return self.hub_modes[c][assignment[c]] == HELD

    def assignment(self, decisions: Decisions) -> tuple[int, ...] | None:
        """The states of given decisions, None when some of them are not among the states or differ inside a class.

        Where nothing wants a node's results, they count as dropped if that is offered, else as kept.
        """
        result: dict[int, int] = {}
        wanted: dict[int, int] = {}
        if not self.copies.keys() >= set(decisions.reuse):
            return None
        if self.modes:
            read, _ = pinned_modes(self.program, decisions.recompute, decisions.reuse)
            for c, mode in zip(self.classes.nodes, read, strict=True):
                # what the last layer drops, because nothing there wants it, the others may keep
                if wanted.setdefault(c, mode) == DROPPED:
                    wanted[c] = mode
                elif mode not in (DROPPED, wanted[c]):
                    return None
        hubs = self._hubs_wanted(decisions, wanted)
        if hubs is None:
            return None
        for c, names in zip(self.classes.nodes, decisions.choices, strict=True):
            found = self._states_named[c].get(names, [])
            if self.modes:
                mode = hubs.get(c, wanted[c])
                if mode == DROPPED and DROPPED not in self.modes[c]:
                    mode = KEPT
                found = [i for i in found if self.modes[c][i] == mode]
            elif c in hubs:
                found = [i for i in found if self.hub_modes[c][i] == hubs[c]]
            if not found or result.setdefault(c, found[0]) != found[0]:
                return None
        for c, layout in zip(self.classes.inputs, decisions.inputs, strict=True):
            states = self.input_states[c]
            if layout not in states or result.setdefault(c, states.index(layout)) != states.index(layout):
                return None
        return tuple(result[c] for c in range(len(self.classes.sizes)))

    @cached_property
    def _states_named(self) -> dict[int, dict[tuple[str, ...], list[int]]]:
        """Per class of nodes, the states that stand for the same names."""
        found: dict[int, dict[tuple[str, ...], list[int]]] = {}
        for c, states in self.node_states.items():
            own = found[c] = {}
            for i, state in enumerate(states):
                own.setdefault(state.names, []).append(i)
        return found

    def _hubs_wanted(self, decisions: Decisions, wanted: dict[int, int]) -> dict[int, int] | None:
        """Per class of ``hub_modes`` the mode that the decisions mean, None where members of a class differ."""
        of, reused = self.classes.nodes, set(decisions.reuse)
        found: dict[int, int] = {}
        for b, f in self.copies.items():
            kept = b in reused
            # the mode in which nothing is held
            other = wanted[of[f]] if self.modes else next(m for m in self.hub_modes[of[f]] if m != HELD)
            if (kept != (found.setdefault(of[f], HELD if kept else other) == HELD)) or (self.modes and kept != (
                    wanted[of[f]] == HELD)):
                return None
            shared = kept or (other in (KEPT, AGAIN) and decisions.choices[f] == decisions.choices[b])
            if found.setdefault(of[b], HELD if shared else DROPPED) != (HELD if shared else DROPPED):
                return None
        return found


def output_layouts(program: Program, inputs: Sequence[Layout], mesh: Mesh) -> tuple[Layout, ...]:
    """Layouts in which outputs are left: gradients like their parameters, new buffers like the buffers, the rest
    replicated."""
    stored = {i.name: lay for i, lay in zip(program.inputs, inputs, strict=True) if i.kind in ("parameter", "buffer")}
    return tuple(
        stored[o.name] if o.kind in ("gradient", "buffer") else replicated(mesh) for o in program.outputs
    )


@rule_cache(10_000)
def _useful_choices(site: Site, mesh: Mesh) -> list[JointChoice]:
    return useful(site, joint_choices(site, mesh), mesh)


def useful(site: Site, choices: Iterable[JointChoice], mesh: Mesh) -> list[JointChoice]:
    """Choices worth considering: no empty pieces where a loop is long enough to go round, no run where its first
    atom already divides, and one of several choices with equal layouts."""
    table = {c.name: c for c in axis_choices(site)}
    factors = factors_on_atoms(site)
    seen: set[Hashable] = set()
    kept = []
    for choice in choices:
        parts: dict[str, list[int]] = defaultdict(list)
        for name, size in zip(choice.names, mesh.sizes, strict=True):
            if name.startswith("f"):
                parts[name].append(size)
        good = all(table[name].size >= int(np.prod(sizes)) for name, sizes in parts.items())
        for name, sizes in parts.items():
            if "+" in name:
                first = factors[int(name[1:].partition("+")[0])].size
                good = good and first % int(np.prod(sizes)) != 0
        key = (choice.inputs, choice.outputs)
        if good and key not in seen:
            seen.add(key)
            kept.append(choice)
    return kept


def formulate(
    program: Program,
    mesh: Mesh,
    prices: Prices,
    *,
    budget_bytes: int | None,
    optimizer_bytes: Callable[[str, str], int],
    recompute: tuple[int, ...] | None = (),
    reuse: Reuse = "never",
    node_filter: NodeFilter | None = None,
    input_filter: InputFilter | None = None,
    tied: bool = True,
    unit: int = MEMORY_UNIT,
    in_time: InTime = ALONE,
    in_flight: int = 1,
) -> Formulation:
    """The placement problem of a program on a mesh.

    Args:
        program: with logical dims and hubs.
        budget_bytes: memory per device, None for no limit.
        recompute: forward nodes that backward runs again (their time counts twice, their results are not saved);
            None: chosen together with the placements.
        reuse: whether copies of parameters are kept from forward to backward.
        optimizer_bytes: (dtype of a parameter, its name) -> optimizer state bytes per element.
        node_filter, input_filter: the user's constraints.
        tied: repeated layers share decisions.
        unit: bytes of a unit of memory.
        in_time: of a program that repeats, what is done once a step and what by every microbatch.
        in_flight: microbatches whose kept values are there at the same time.

    Raises:
        Infeasible: the constraints leave some node or input without any choice.
    """
    classes = tie_layers(program, tied=tied)
    copies = keepable(program, classes) if reuse != "never" and mesh.world_size > 1 else {}
    modes = ClassModes.of(program, classes, recompute, copies, reuse == "always")
    count = len(classes.sizes)
    costs: list[IntArray] = [np.zeros(0, np.int64)] * count
    memory: list[IntArray] = [np.zeros(0, np.int64)] * count
    names = [""] * count
    node_states: dict[int, tuple[JointChoice, ...]] = {}
    input_states: dict[int, tuple[Layout, ...]] = {}
    free: dict[Site, list[JointChoice]] = {}
    for index, c in enumerate(classes.nodes):
        if c in node_states:
            continue
        site = classes.sites[index]
        if site not in free:
            free[site] = _useful_choices(site, mesh)
        choices = [s for s in free[site] if not _pending(s)] if c in modes.hubs else free[site]
        states = tuple(node_filter(index, site, choices)) if node_filter else tuple(choices)
        if not states:
            node = program.nodes[index]
            raise Infeasible(f"the constraints leave no choice for {node.op}", where=f"{node.source} {node.module}")
        names[c] = f"{program.nodes[index].op}#{index}"
        once = np.array([prices.op_ns(site, s) for s in states], np.int64)
        if recompute is None:
            offered = modes.offered[c]
            costs[c] = np.concatenate([(2 if m == AGAIN else 1) * classes.sizes[c] * once for m in offered])
            modes.states[c] = tuple(m for m in offered for _ in states)
            if c in modes.hubs:
                modes.hubs[c] = modes.states[c]
            states = states * len(offered)
        else:
            costs[c] = (classes.sizes[c] + modes.repeats[c]) * once
            if c in modes.hubs:
                costs[c] = np.concatenate([costs[c], costs[c]])
                modes.hubs[c] = tuple(m for m in modes.hubs[c] for _ in states)
                states = states * 2
        node_states[c] = states
        memory[c] = np.zeros(len(states), np.int64)
    for index, c in enumerate(classes.inputs):
        if c in input_states:
            continue
        item = program.inputs[index]
        dims, kind = program.dims[item.value], program.types[item.value]
        layouts: Sequence[Layout] = stored_layouts(item, dims, mesh)
        layouts = input_filter(index, layouts) if input_filter else layouts
        if not layouts:
            raise Infeasible(f"the constraints leave no layout for {item.name}")
        input_states[c] = tuple(layouts)
        names[c] = item.name
        costs[c] = np.zeros(len(layouts), np.int64)
        extra, grad = 0, item.requires_grad and (program.time is None or in_time.reduce_each)
        if item.kind == "parameter" and item.requires_grad:
            extra = optimizer_bytes(kind.dtype, item.name)
        memory[c] = classes.sizes[c] * np.array(
            [units(_input_bytes(prices, lay, dims, kind, grad, extra), unit) for lay in layouts], np.int64
        )
    # a value that a node reads twice is brought into a layout once: one edge for all its operands
    edges: Counter[tuple[int, int, int, tuple[int, ...], bool, Part | None, Dims, TensorType]] = Counter()
    source = sources(program, classes)
    guarded = {classes.nodes[n] for n in reduced_early(program)}
    listed = frozenset(recompute or ())
    for index, (node, c) in enumerate(zip(program.nodes, classes.nodes, strict=True)):
        weight = times(modes.kinds[c], modes.pinned[index]) if index in listed else 1
        reads = node_inputs(node)
        for value in dict.fromkeys(reads):
            s = source[value]
            operands = tuple(o for o, v in enumerate(reads) if v == value)
            crossing = recompute is None and modes.crosses(value, index)
            use = (s.owner, s.output, c, operands, crossing)
            of = (program.dims[value], program.types[value])
            for part, times_ in modes.parts(index, weight):
                edges[*use, part, *of] += times_
    add_activations(program, modes, prices, source, node_states, memory, unit, in_flight)
    add_copies(program, modes, copies, prices, node_states, memory, unit)
    owner_of = {i.name: c for i, c in zip(program.inputs, classes.inputs, strict=True)
                if i.kind in ("parameter", "buffer")}
    layouts_out: dict[tuple[int, int], tuple[Layout, ...]] = {}

    def out_layouts(c: int, output: int) -> tuple[Layout, ...]:
        if (c, output) not in layouts_out:
            layouts_out[c, output] = (
                input_states[c] if c in input_states else tuple(s.outputs[output] for s in node_states[c])
            )
        return layouts_out[c, output]

    whole = replicated(mesh)
    builder = EdgeTables(prices)
    for output in program.outputs:
        s = source[output.value]
        dims, kind = program.dims[output.value], program.types[output.value]
        if output.kind in ("gradient", "buffer"):
            edges[s.owner, s.output, owner_of[output.name], (), False, None, dims, kind] += 1
            if output.kind == "gradient" and program.time is not None and not in_time.reduce_each:
                memory[s.owner] = memory[s.owner] + np.array([
                    units(prices.stored_bytes(lay, dims, kind.dtype), unit) for lay in out_layouts(s.owner, s.output)
                ], np.int64)
        else:
            left = builder.matrix(out_layouts(s.owner, s.output), (whole,), dims, kind, "reshard")
            costs[s.owner] = costs[s.owner] + left[:, 0]
    result_edges = []
    uses: list[Use | None] = []
    often = Often(program, classes, in_time)
    costs = [often.costs(c, row) for c, row in enumerate(costs)]
    for (u, o, v, operands, crossing, part, dims, kind), weight in edges.items():
        wanted = tuple(tuple(s.inputs[i] for s in node_states[v]) for i in operands) or (input_states[v],)
        price: PriceKind = "gradient" if not operands else "input" if u in input_states else "reshard"
        pair: Pair | Copies | None = modes.pair(u, v, crossing) if operands else None
        weight *= often.edge(u, v, bool(operands))
        if part is not None:
            pair = Copies(modes.hubs[v], part, modes.always)
        if u == v:
            own = builder.joint_matrix(out_layouts(u, o), wanted, dims, kind, price)
            own = np.diagonal(own if pair is None else pair.apply(own, own > 0))
            costs[u] = np.where((own >= FORBIDDEN) | (costs[u] >= FORBIDDEN), FORBIDDEN, costs[u] + weight * own)
        else:
            flags = EdgeFlags(price, v in guarded and kind.dtype == COMPUTE, pair)
            result_edges.append(Edge(u, v, builder.table(out_layouts(u, o), wanted, dims, kind, flags), weight))
            uses.append(Use(u, o, price))
    for f, b in dict.fromkeys((classes.nodes[f], classes.nodes[b]) for b, f in copies.items()):
        table = builder.add(pairs_allowed(out_layouts(f, 0), modes.hubs[f], out_layouts(b, 0), modes.hubs[b]))
        result_edges.append(Edge(f, b, table, 1))
        uses.append(None)
    problem = Problem(
        tuple(Variable(n, np.ascontiguousarray(c), m) for n, c, m in zip(names, costs, memory, strict=True)),
        tuple(result_edges), tuple(builder.tables),
        None if budget_bytes is None else budget_bytes // unit,
    )
    return Formulation(
        program, mesh, classes, node_states, input_states, problem, recompute or (), modes.states, copies, modes.hubs,
        reuse, unit=unit, uses=tuple(uses), in_time=in_time,
    )


def with_temporaries(formulation: Formulation, prices: Prices, values: Sequence[int]) -> Formulation:
    """The formulation with the bytes of more values in the memory row: of those that are live at the same time.

    Args:
        values: program values, one entry per tensor; inputs are passed over.
    """
    program, classes = formulation.program, formulation.classes
    source = sources(program, classes)
    # one entry after the other: in whichever portions values come, the row is the same
    counts = Counter((source[v].owner, source[v].output, program.dims[v], program.types[v].dtype) for v in values)
    memory = {c: formulation.problem.variables[c].memory.copy() for c, *_ in counts if c in formulation.node_states}
    for (c, output, dims, dtype), count in counts.items():
        if c in memory:
            memory[c] += np.array([count * units(prices.stored_bytes(s.outputs[output], dims, dtype), formulation.unit)
                                   for s in formulation.node_states[c]], np.int64)
    variables = tuple(
        replace(v, memory=memory[c]) if c in memory else v for c, v in enumerate(formulation.problem.variables)
    )
    counted = tuple(sorted((*formulation.temporaries, *values)))
    return replace(formulation, problem=replace(formulation.problem, variables=variables), temporaries=counted)


def _input_bytes(prices: Prices, layout: Layout, dims: Dims, kind: TensorType, grad: bool, optimizer: int) -> int:
    size = prices.stored_bytes(layout, dims, kind.dtype)
    elements = prices.stored_bytes(layout, dims, "int8") if optimizer else 0
    return (2 if grad else 1) * size + optimizer * elements


def _pending(choice: JointChoice) -> bool:
    """True for a hub that leaves a parameter as a sum that is not reduced yet, which nothing is served by."""
    return any(isinstance(p, Partial) for layout in choice.outputs for p in layout)
