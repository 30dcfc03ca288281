"""Program + decisions + a rank's coordinates -> the rank's local program.

Every node becomes its local call; wherever a value is needed in another layout than it has, the chain of
:func:`fxpar.plans.reshard.reshard_steps` is inserted, once per (value, layout, phase):

    mm(x: [S(0)], w: [S(0)])   ->   w1 = all_gather(w); y = mm(x, w1)

A choice that expands (:mod:`fxpar.rules.expansion`) becomes several ops and collectives.
A node of ``fxpar.hub.default`` only names a layout: its operand's reshard, no op. Nodes in ``Decisions.recompute`` run
again in backward, right before their first use there. A backward hub in ``Decisions.reuse`` is the forward hub's local
value, which lives until then; that hub's reshard is never made again. Where a parameter's forward hub is listed and
the backward hub has the same layout, both mean one reshard in backward.
"""

from __future__ import annotations

from functools import lru_cache

from fxpar.plans.errors import PlanFileError
from fxpar.plans.layout import Dims, Layout, largest_shape, layout_text, local_shape
from fxpar.plans.lifetimes import HUB, hub_partners, parameter_hubs, reuse_problems
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Arg, Node, Program, Ref, TensorType, map_refs, node_inputs
from fxpar.plans.reshard import Step, reshard_steps
from fxpar.rules.choices import JointChoice, Site, choice_by_names, sites_of
from fxpar.rules.expansion import Exchange, LocalOp
from fxpar.rules.factor_rule import rebind
from fxpar.rules.localise import expansion_of, local_call
from fxpar.rules.registry import rule_cache
from fxpar.runtime.local import AnyStep, CollectiveStep, Geometry, LocalProgram, LocalStep, OpStep, Phase
from fxpar.runtime.rewrite.geometry import all_to_all_swap, exchange_geometry, gather_cut, scatter_cut


def localise(
    program: Program, decisions: Decisions, coords: tuple[int, ...], *, shared: bool = True
) -> LocalProgram:
    """The local program of the rank at ``coords``.

    ``shared``: uses of a value in the same layout and phase share its reshard; else each makes its own, as plans are
    priced (where a reshard is worth sharing the value has a hub).

    Raises:
        PlanFileError: a choice names what the op's rule does not offer, a layout does not fit, or counts differ.
    """
    _check_counts(program, decisions)
    return _Localiser(program, decisions, coords, shared).run()


@rule_cache(100_000)
def _joint(site: Site, names: tuple[str, ...], mesh: Mesh) -> JointChoice | None:
    return choice_by_names(site, names, mesh)


_local_shape = lru_cache(maxsize=100_000)(local_shape)


def _check_counts(program: Program, decisions: Decisions) -> None:
    for what, have, want in (
        ("choices", len(decisions.choices), len(program.nodes)),
        ("input layouts", len(decisions.inputs), len(program.inputs)),
        ("output layouts", len(decisions.outputs), len(program.outputs)),
        ("logical dims", len(program.dims), len(program.types)),
    ):
        if have != want:
            raise PlanFileError(f"the plan has {have} {what} for {want} of its program")
    problems = list(reuse_problems(program, decisions))
    if problems:
        raise PlanFileError("the plan keeps a copy that cannot be kept", where=f"mesh {decisions.mesh}",
                            numbers="; ".join(problems[:5]), way_out="compile the plan again with `fxpar compile`")


class _Localiser:
    """Builds one rank's steps; used once."""

    def __init__(self, program: Program, decisions: Decisions, coords: tuple[int, ...], shared: bool) -> None:
        self.program, self.mesh, self.coords, self.shared = program, decisions.mesh, coords, shared
        self.decisions = decisions
        self.types: list[TensorType] = []
        self.origins: list[tuple[int, Layout]] = []
        self.steps: list[AnyStep] = []
        self.produced: dict[int, tuple[Layout, int]] = {}
        self.recomputed: dict[int, tuple[Layout, int]] = {}
        self.resharded: dict[tuple[int, Layout, Phase], int] = {}
        # backward hub -> the forward hub whose local value it is
        self.kept = {n: h for n, h in hub_partners(program).items() if n in decisions.reuse} if decisions.reuse else {}
        self.again = frozenset(decisions.recompute)
        # backward hub -> the forward hub that is made again in the same layout
        self.shared_hubs = {n: h for n, h in parameter_hubs(program).items()
                            if h in self.again and decisions.choices[n] == decisions.choices[h]} if self.again else {}
        self.sites = sites_of(program)
        self.calls: dict[tuple[Site, tuple[str, ...]], tuple[str, tuple[Arg, ...]]] = {}
        self.producer = {v: i for i, node in enumerate(program.nodes) for v in node.outputs if v >= 0}

    def run(self) -> LocalProgram:
        inputs = []
        for entry, layout in zip(self.program.inputs, self.decisions.inputs, strict=True):
            local = self.define(entry.value, layout)
            self.produced[entry.value] = (layout, local)
            inputs.append(local)
        leaving: dict[int, list[int]] = {}
        for index, output in enumerate(self.program.outputs):
            leaving.setdefault(self.producer.get(output.value, -1), []).append(index)
        outputs = [-1] * len(self.program.outputs)
        for index in (-1, *range(len(self.program.nodes))):
            if index >= 0:
                self.node(index, self.program.nodes[index].phase, self.produced)
            # a result leaves as soon as it is there: a gradient's reduction overlaps with what follows
            for position in leaving.get(index, ()):
                outputs[position] = self.leave(position)
        return LocalProgram(
            self.mesh,
            self.coords,
            tuple(self.types),
            tuple(self.origins),
            tuple(inputs),
            tuple(self.steps),
            tuple(outputs),
        )

    def leave(self, position: int) -> int:
        output = self.program.outputs[position]
        producer = self.producer.get(output.value)
        backward = output.kind == "gradient" or (
            producer is not None and self.program.nodes[producer].phase == "backward"
        )
        layout, local = self.produced[output.value]
        return self.reshard(
            output.value, local, layout, self.decisions.outputs[position], "backward" if backward else "forward"
        )

    def define(self, value: int, layout: Layout) -> int:
        """A new local value that stands for ``value`` in ``layout``."""
        global_type, dims = self.program.types[value], self.program.dims[value]
        self.types.append(TensorType(_local_shape(dims, layout, self.mesh, self.coords), global_type.dtype))
        self.origins.append((value, layout))
        return len(self.types) - 1

    def node(self, index: int, phase: Phase, into: dict[int, tuple[Layout, int]]) -> None:
        """Emit the node; its results are entered in ``into``."""
        node = self.program.nodes[index]
        site = self.sites[index]
        choice = _joint(site, self.decisions.choices[index], self.mesh)
        if choice is None:
            raise PlanFileError(
                f"the plan's choice {self.decisions.choices[index]} is not one that {node.op} offers",
                where=_place(index, node),
            )
        if index in self.kept:
            into[node.outputs[0]] = self.produced[self.program.nodes[self.kept[index]].outputs[0]]
            return
        if index in self.shared_hubs:
            hub = self.shared_hubs[index]
            result = self.program.nodes[hub].outputs[0]
            if result not in self.recomputed:
                self.run_again(hub)
            into[node.outputs[0]] = self.recomputed[result]
            return
        repeated = into is self.recomputed
        reads = tuple(zip(node_inputs(node), choice.inputs, strict=True))
        # a node that reads a value twice brings it along once
        brought = {(value, layout): self.use(value, layout, phase) for value, layout in dict.fromkeys(reads)}
        operands = tuple(brought[read] for read in reads)
        if node.op == HUB:
            into[node.outputs[0]] = (choice.outputs[0], operands[0])
            return
        outputs = tuple(
            -1 if v < 0 else self.define(v, layout) for v, layout in zip(node.outputs, choice.outputs, strict=True)
        )
        if choice.expands:
            self.expand(site, choice, operands, outputs, index, phase, repeated)
        else:
            key = (site, choice.names)
            if key not in self.calls:
                self.calls[key] = local_call(site, choice, self.mesh, self.coords)
            op, args = self.calls[key]
            self.steps.append(OpStep(op, rebind(args, operands), operands, outputs, index, phase, repeated))
        for value, layout, local in zip(node.outputs, choice.outputs, outputs, strict=True):
            if value >= 0:
                into[value] = (layout, local)

    def expand(
        self, site: Site, choice: JointChoice, operands: tuple[int, ...], outputs: tuple[int, ...], index: int,
        phase: Phase, repeated: bool,
    ) -> None:
        """Emit the steps of a choice that expands."""
        expansion = expansion_of(site, choice, self.mesh, self.coords)
        # sizes are those of the rank that holds most, on all ranks alike
        largest = expansion_of(site, choice, self.mesh, (0,) * len(self.coords))
        known = dict(enumerate(operands))
        # a result that nobody reads has no number: inner steps may still read it
        known |= {v: local for v, local in zip(expansion.outputs, outputs, strict=True) if v >= 0 and local >= 0}

        def named(value: int) -> int:
            if value not in known:
                self.types.append(expansion.types[value])
                self.origins.append((-1, ()))
                known[value] = len(self.types) - 1
            return known[value]

        for step, first in zip(expansion.steps, largest.steps, strict=True):
            if isinstance(step, LocalOp):
                reads = tuple(named(v) for v in step.reads)
                made = tuple(-1 if v < 0 else named(v) for v in step.outputs)
                renamed: dict[int, Arg] = {v: Ref(local) for v, local in zip(step.reads, reads, strict=True)}
                args = tuple(map_refs(arg, renamed) for arg in step.args)
                self.steps.append(OpStep(step.op, args, reads, made, index, phase, repeated))
            elif isinstance(first, Exchange):
                value = named(step.value)
                geometries, dtype = exchange_geometry(step, self.types[value].shape), self.types[value].dtype
                self.steps.append(
                    CollectiveStep(
                        step.kind, step.axis, step.reduce, (value,), (named(step.output),), geometries, first.elements,
                        dtype, phase,
                    )
                )

    def use(self, value: int, layout: Layout, phase: Phase) -> int:
        """The local value of ``value`` in ``layout`` for a step of ``phase``."""
        produced = self.produced.get(value)
        producer = self.producer.get(value)
        if phase == "backward" and producer is not None and producer in self.again:
            if value not in self.recomputed:
                self.run_again(producer)
            produced = self.recomputed[value]
        if produced is None:
            raise PlanFileError(f"value {value} is used before it is made", where="the plan's program")
        have, local = produced
        return self.reshard(value, local, have, layout, phase)

    def run_again(self, index: int) -> None:
        """Emit a recomputed node, after those that it needs and that did not run again yet."""
        needed: set[int] = set()
        todo = [index]
        while todo:
            one = todo.pop()
            node = self.program.nodes[one]
            if one in needed or not self.recomputed.keys().isdisjoint(node.outputs):
                continue
            needed.add(one)
            todo += [p for v in node_inputs(node) if (p := self.producer.get(v)) is not None and p in self.again]
        for one in sorted(needed):
            self.node(one, "backward", self.recomputed)

    def reshard(self, value: int, local: int, have: Layout, want: Layout, phase: Phase) -> int:
        """``local`` (``value`` in layout ``have``) in layout ``want``; the chain is emitted once per phase."""
        if have == want:
            return local
        key = (value, want, phase)
        if key not in self.resharded or not self.shared:
            try:
                chain = reshard_steps(have, want, self.program.dims[value], self.mesh)
            except ValueError as error:
                raise PlanFileError(
                    f"value {value} cannot go from {layout_text(have)} to {layout_text(want)}", numbers=str(error)
                ) from error
            for step in chain:
                local = self.step(step, value, local, phase)
            self.resharded[key] = local
        return self.resharded[key]

    def step(self, step: Step, value: int, local: int, phase: Phase) -> int:
        """Emit one reshard step."""
        dims, axis = self.program.dims[value], step.axis
        if step.kind == "alias":
            return local
        output = self.define(value, step.after)
        if step.kind == "slice":
            cut = scatter_cut(step, dims, self.mesh, self.coords)
            me = self.coords[axis]
            self.steps.append(
                LocalStep(
                    "slice", axis, local, output, phase, cut.outer, sum(cut.lengths[:me]), cut.lengths[me], cut.inner
                )
            )
        elif step.kind == "to_partial":
            keep = self.coords[axis] == 0 or step.reduce in ("max", "min")
            self.steps.append(LocalStep("to_partial", axis, local, output, phase, keep=keep))
        else:
            geometries: tuple[Geometry, ...] = ()
            if step.kind == "all_gather":
                geometries = (gather_cut(step, dims, self.mesh, self.coords),)
            elif step.kind == "reduce_scatter":
                geometries = (scatter_cut(step, dims, self.mesh, self.coords),)
            elif step.kind == "all_to_all":
                geometries = (all_to_all_swap(step, dims, self.mesh, self.coords),)
            self.steps.append(
                CollectiveStep(
                    step.kind,
                    axis,
                    step.reduce,
                    (local,),
                    (output,),
                    geometries,
                    largest_elements(step, dims, self.mesh),
                    self.types[local].dtype,
                    phase,
                )
            )
        return output


@lru_cache(maxsize=50_000)
def largest_elements(step: Step, dims: Dims, mesh: Mesh) -> int:
    """Elements of the full tensor of a step on the rank that holds most."""
    sizes = []
    for layout in (step.before, step.after):
        count = 1
        for n in largest_shape(dims, layout, mesh):
            count *= n
        sizes.append(count)
    return max(sizes)


def _place(index: int, node: Node) -> str:
    where = f"node {index}"
    if node.module:
        where += f", module {node.module}"
    return f"{where}, {node.source}" if node.source else where
