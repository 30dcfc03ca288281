"""From a program, a mesh and prices to a numeric problem, and from an assignment back to decisions.

One variable per class of nodes (state: a joint choice) and per class of inputs (state: a stored layout). A node's own
cost is the time of its local op; every use of a value costs the reshard from the layout it is produced in to the one
the reader wants (a value with several readers goes through a hub, so a shared reshard is paid once); a gradient is
resharded to the layout its parameter is stored in. Memory: parameters, gradients and optimizer state of the stored
shard, and every forward value that backward reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.layers import Classes, tie_layers
from fxpar.plans.errors import Infeasible
from fxpar.plans.layout import Dims, Layout, Partial, replicated
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, TensorType, node_inputs
from fxpar.precision import COMPUTE, reduced_early
from fxpar.prices import Prices, local_work
from fxpar.recompute import saved_values
from fxpar.rules.choices import JointChoice, Site, axis_choices, factors_on_atoms, joint_choices
from fxpar.solver.problem import FORBIDDEN, Edge, IntArray, Problem, Variable
from fxpar.stored import stored_layouts

MEMORY_UNIT = 64 * 1024

NodeFilter = Callable[[int, Site, Sequence[JointChoice]], Sequence[JointChoice]]
"""(node index, site, choices) -> the choices that the user's request leaves."""
InputFilter = Callable[[int, Sequence[Layout]], Sequence[Layout]]
"""(input index, layouts) -> the stored layouts that the user's request leaves."""


@dataclass(frozen=True, eq=False)
class Formulation:
    """A problem and what its states mean. Class ids are those of ``classes``; variables follow the same order."""

    program: Program
    mesh: Mesh
    classes: Classes
    node_states: dict[int, tuple[JointChoice, ...]]
    input_states: dict[int, tuple[Layout, ...]]
    problem: Problem
    recompute: tuple[int, ...] = ()

    def decisions(self, assignment: Sequence[int]) -> Decisions:
        """The decisions that an assignment stands for."""
        inputs = tuple(self.input_states[c][assignment[c]] for c in self.classes.inputs)
        return Decisions(
            self.mesh,
            tuple(self.node_states[c][assignment[c]].names for c in self.classes.nodes),
            inputs,
            output_layouts(self.program, inputs, self.mesh),
            self.recompute,
        )

    def assignment(self, decisions: Decisions) -> tuple[int, ...] | None:
        """The states of given decisions, None when some of them are not among the states or differ inside a class."""
        result: dict[int, int] = {}
        for c, names in zip(self.classes.nodes, decisions.choices, strict=True):
            found = [i for i, s in enumerate(self.node_states[c]) if s.names == names]
            if not found or result.setdefault(c, found[0]) != found[0]:
                return None
        for c, layout in zip(self.classes.inputs, decisions.inputs, strict=True):
            states = self.input_states[c]
            if layout not in states or result.setdefault(c, states.index(layout)) != states.index(layout):
                return None
        return tuple(result[c] for c in range(len(self.classes.sizes)))


def output_layouts(program: Program, inputs: Sequence[Layout], mesh: Mesh) -> tuple[Layout, ...]:
    """Layouts in which outputs are left: gradients like their parameters, new buffers like the buffers, the rest
    replicated."""
    stored = {i.name: lay for i, lay in zip(program.inputs, inputs, strict=True) if i.kind in ("parameter", "buffer")}
    return tuple(
        stored[o.name] if o.kind in ("gradient", "buffer") else replicated(mesh) for o in program.outputs
    )


@dataclass(frozen=True)
class Source:
    """Where a value comes from: the class that makes it and which of its outputs it is (0 for inputs)."""

    owner: int
    output: int


def sources(program: Program, classes: Classes) -> dict[int, Source]:
    """Per value, its source."""
    result = {item.value: Source(c, 0) for item, c in zip(program.inputs, classes.inputs, strict=True)}
    for node, c in zip(program.nodes, classes.nodes, strict=True):
        result.update({v: Source(c, o) for o, v in enumerate(node.outputs) if v >= 0})
    return result


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
    recompute: tuple[int, ...] = (),
    node_filter: NodeFilter | None = None,
    input_filter: InputFilter | None = None,
    tied: bool = True,
) -> Formulation:
    """The placement problem of a program on a mesh.

    Args:
        program: with logical dims and hubs.
        budget_bytes: memory per device, None for no limit.
        recompute: forward nodes that backward runs again (their time counts twice, their results are not saved).
        optimizer_bytes: (dtype of a parameter, its name) -> optimizer state bytes per element.
        node_filter, input_filter: the user's constraints.
        tied: repeated layers share decisions.

    Raises:
        Infeasible: the constraints leave some node or input without any choice.
    """
    classes = tie_layers(program, tied=tied)
    saved = saved_values(program, recompute, _view_test(classes, mesh))
    repeats = Counter(classes.nodes[n] for n in saved.again)
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
            free[site] = useful(site, joint_choices(site, mesh), mesh)
        states = tuple(node_filter(index, site, free[site])) if node_filter else tuple(free[site])
        if not states:
            node = program.nodes[index]
            raise Infeasible(f"the constraints leave no choice for {node.op}", where=f"{node.source} {node.module}")
        node_states[c] = states
        names[c] = f"{program.nodes[index].op}#{index}"
        costs[c] = (classes.sizes[c] + repeats[c]) * np.array([prices.op_ns(site, s) for s in states], np.int64)
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
        extra = 0
        if item.kind == "parameter" and item.requires_grad:
            extra = optimizer_bytes(kind.dtype, item.name)
        memory[c] = classes.sizes[c] * np.array(
            [_units(_input_bytes(prices, lay, dims, kind, item.requires_grad, extra)) for lay in layouts], np.int64
        )
    edges: Counter[tuple[int, int, int, int, Dims, TensorType]] = Counter()
    source = sources(program, classes)
    guarded = {classes.nodes[n] for n in reduced_early(program)}
    for node, c in zip(program.nodes, classes.nodes, strict=True):
        for operand, value in enumerate(node_inputs(node)):
            s = source[value]
            edges[s.owner, s.output, c, operand, program.dims[value], program.types[value]] += 1
    _add_saved(program, saved.values, prices, source, node_states, memory)
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
    builder = _Tables(prices)
    for output in program.outputs:
        s = source[output.value]
        dims, kind = program.dims[output.value], program.types[output.value]
        if output.kind in ("gradient", "buffer"):
            edges[s.owner, s.output, owner_of[output.name], -1, dims, kind] += 1
        else:
            costs[s.owner] = costs[s.owner] + builder.matrix(out_layouts(s.owner, s.output), (whole,), dims, kind)[:, 0]
    result_edges = []
    for (u, o, v, operand, dims, kind), weight in edges.items():
        wanted = input_states[v] if operand < 0 else tuple(s.inputs[operand] for s in node_states[v])
        flags = _Flags(gradient=operand < 0, keep_sums=v in guarded and kind.dtype == COMPUTE)
        if u == v:
            costs[u] = costs[u] + weight * np.diagonal(builder.matrix(out_layouts(u, o), wanted, dims, kind))
        else:
            table = builder.table(out_layouts(u, o), wanted, dims, kind, flags)
            result_edges.append(Edge(u, v, table, weight))
    problem = Problem(
        tuple(Variable(n, np.ascontiguousarray(c), m) for n, c, m in zip(names, costs, memory, strict=True)),
        tuple(result_edges), tuple(builder.tables),
        None if budget_bytes is None else budget_bytes // MEMORY_UNIT,
    )
    return Formulation(program, mesh, classes, node_states, input_states, problem, recompute)


def _units(size: int) -> int:
    return -(-size // MEMORY_UNIT)


def _input_bytes(prices: Prices, layout: Layout, dims: Dims, kind: TensorType, grad: bool, optimizer: int) -> int:
    size = prices.stored_bytes(layout, dims, kind.dtype)
    if not grad:
        return size
    elements = prices.stored_bytes(layout, dims, "int8")
    return 2 * size + optimizer * elements


def _add_saved(
    program: Program, values: Sequence[int], prices: Prices, source: dict[int, Source],
    node_states: dict[int, tuple[JointChoice, ...]], memory: list[IntArray],
) -> None:
    """Add the bytes of saved forward values to the memory of the classes that make them."""
    counts: Counter[tuple[int, int, Dims, str]] = Counter()
    for value in values:
        s = source[value]
        counts[s.owner, s.output, program.dims[value], program.types[value].dtype] += 1
    for (c, output, dims, dtype), count in counts.items():
        sizes = [_units(count * prices.stored_bytes(s.outputs[output], dims, dtype)) for s in node_states[c]]
        memory[c] = memory[c] + np.array(sizes, np.int64)


def _view_test(classes: Classes, mesh: Mesh) -> Callable[[int], bool]:
    """Is node ``n`` a view (or a hub) of its first operand?"""
    known: dict[Site, bool] = {}

    def is_view(node: int) -> bool:
        site = classes.sites[node]
        if site not in known:
            if site.call.op == "fxpar.hub.default":
                known[site] = True
            else:
                whole = JointChoice((), tuple(replicated(mesh) for _ in site.inputs),
                                    tuple(replicated(mesh) for _ in site.outputs))
                known[site] = bool(site.inputs) and local_work(site, whole, mesh).kind == "view"
        return known[site]

    return is_view


@dataclass(frozen=True)
class _Flags:
    """``gradient``: the edge leads to the parameter of a gradient; ``keep_sums``: pending sums may not be reduced."""

    gradient: bool = False
    keep_sums: bool = False


class _Tables:
    """Reshard tables, each distinct one once."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.tables: list[IntArray] = []
        self._known: dict[Hashable, int] = {}
        self._matrices: dict[Hashable, IntArray] = {}

    def matrix(
        self, source: Sequence[Layout], target: Sequence[Layout], dims: Dims, kind: TensorType, gradient: bool = False
    ) -> IntArray:
        """[len(source), len(target)] ns of resharding."""
        rows, row_of = _unique(source)
        columns, column_of = _unique(target)
        key = (rows, columns, dims, kind.dtype, gradient)
        if key not in self._matrices:
            price = self.prices.gradient_ns if gradient else self.prices.reshard_ns
            self._matrices[key] = np.array([[price(a, b, dims, kind) for b in columns] for a in rows], np.int64)
        return self._matrices[key][np.ix_(row_of, column_of)]

    def table(
        self, source: Sequence[Layout], target: Sequence[Layout], dims: Dims, kind: TensorType, flags: _Flags
    ) -> int:
        """Index of the table in ``tables``."""
        key = (tuple(source), tuple(target), dims, kind.dtype, flags)
        if key not in self._known:
            self._known[key] = len(self.tables)
            matrix = self.matrix(source, target, dims, kind, flags.gradient)
            if flags.keep_sums:
                reduced = [[any(p != q for p, q in zip(a, b, strict=True) if isinstance(p, Partial)) for b in target]
                           for a in source]
                matrix = np.where(np.array(reduced), FORBIDDEN, matrix)
            self.tables.append(matrix)
        return self._known[key]


def _unique(layouts: Sequence[Layout]) -> tuple[tuple[Layout, ...], list[int]]:
    table: dict[Layout, int] = {}
    index = [table.setdefault(lay, len(table)) for lay in layouts]
    return tuple(table), index
