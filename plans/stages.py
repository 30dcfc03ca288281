"""Cut a joint program into the stages of a pipeline, each a program of its own.

    forward   stage 0 ──▶ stage 1 ──▶ stage 2        a value that stage 2 needs of stage 0 is carried through stage 1
    backward  stage 0 ◀── stage 1 ◀── stage 2        and so is its gradient; what several stages add to it is added up
                                                     on the way

What depends on inputs only (position tables, masks), what a parameter is read through (casts, views) and hubs are
computed by every stage that reads them. A backward op follows its forward op: it runs in the last stage that gradients
it reads come from and that has the forward values it reads. A parameter that several stages read has a gradient in
each; one stage owns it, sums them, and takes the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from fxpar.plans.errors import PlanFileError
from fxpar.plans.lifetimes import HUB, parameter_roots
from fxpar.plans.program import Arg, Input, Microbatches, Node, Output, Program, Ref, map_refs, node_inputs

FREE = -1
"""Stage of a node that every stage that needs it runs."""
_SHARED = -2
"""Stage of a node that sums gradients of one parameter over stages: each runs its part."""
_ADD = "aten.add.Tensor"
# linear in one tensor: the sum over stages may be taken after them
_LINEAR = frozenset({
    HUB, "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.view.default",
    "aten._unsafe_view.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.detach.default",
    "aten.alias.default", "aten.clone.default", "aten._to_copy.default",
})


@dataclass(frozen=True)
class Stage:
    """One stage as a program, and how it lies in the whole one.

    Attributes:
        program: gradients that come in are its inputs of kind ``tangent``, other values that come in of kind ``input``,
            all that goes out is an output of kind ``output``; parameters that it owns or reads are among its inputs.
        nodes: per node, its index in the whole program.
        values: per value, its number in the whole program.
        inputs: per input, its position in the whole program's; -1 for what comes from another stage.
        outputs: per output, its position in the whole program's; -1 for what goes to another stage.
        received, sent: input and output positions of what forward takes from the stage before and hands to the next;
            ``sent`` of a stage and ``received`` of the next are the same values in the same order.
        gradients_received, gradients_sent: the same of backward, from the next stage and to the one before.
    """

    program: Program
    nodes: tuple[int, ...]
    values: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    gradients_received: tuple[int, ...]
    gradients_sent: tuple[int, ...]


@dataclass(frozen=True)
class Stages:
    """All stages of a program.

    ``owners[i]``: the stage that owns input ``i``, -1 where it is no parameter; ``parts[i]``: the stages in which it
    has a gradient; ``stage_of[n]``: where node ``n`` runs (:data:`FREE`: wherever it is read).
    """

    stages: tuple[Stage, ...]
    owners: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    stage_of: tuple[int, ...]


def stage_at(program: Program, cuts: Sequence[int]) -> tuple[int, ...]:
    """Per node its stage when forward is cut before the nodes ``cuts`` (ascending): 0 before the first of them."""
    return tuple(bisect_right(cuts, index) for index in range(len(program.nodes)))


def free_nodes(program: Program) -> tuple[bool, ...]:
    """Per node, whether every stage runs it that reads it, wherever it stands."""
    cutter = _Cutter(program, (), 0)
    cutter.free = cutter.free_values()
    return tuple(cutter.is_free(index) for index in range(len(program.nodes)))


def cut_problems(program: Program, cuts: Sequence[int]) -> Iterator[str]:
    """What is wrong with cutting forward before the nodes ``cuts``."""
    last = max((n for n, node in enumerate(program.nodes) if node.phase == "forward"), default=0)
    if list(cuts) != sorted(set(cuts)) or any(not 0 < cut <= last for cut in cuts):
        yield f"stages are cut before nodes {list(cuts)[:8]}, the last forward op is node {last}"


def cut_stages(program: Program, stages: Sequence[int], count: int) -> Stages:
    """The stages of a program.

    Args:
        stages: per node; those of backward nodes, and of nodes that every stage repeats, are not looked at.
        count: how many there are.

    Raises:
        PlanFileError: an op reads what a later stage makes, or a stage does not exist.
    """
    return _Cutter(program, stages, count).run()


class _Cutter:
    """Cuts one program; used once."""

    def __init__(self, program: Program, stages: Sequence[int], count: int) -> None:
        self.program, self.given, self.count = program, stages, count
        self.producer = {v: i for i, node in enumerate(program.nodes) for v in node.outputs if v >= 0}
        # a hub is the value it is of, and stands wherever that value is read
        self.base: dict[int, int] = {}
        for node in program.nodes:
            if node.op == HUB:
                operand = node_inputs(node)[0]
                self.base[node.outputs[0]] = self.base.get(operand, operand)
        self.reads = [tuple(self.base.get(v, v) for v in node_inputs(node)) for node in program.nodes]
        self.readers: dict[int, list[int]] = {}
        for index, values in enumerate(self.reads):
            for value in dict.fromkeys(values if program.nodes[index].op != HUB else ()):
                self.readers.setdefault(value, []).append(index)
        self.tangents = {i.value for i in program.inputs if i.kind == "tangent"}
        self.leaving: dict[int, int] = {}
        for output in program.outputs:
            self.leaving[output.value] = self.leaving.get(output.value, 0) + 1

    def run(self) -> Stages:
        self.free = self.free_values()
        self.home = [FREE] * len(self.program.nodes)
        self.place_forward()
        self.reach = {v: max(self.forward_stages(v)) for v in self.forward_values()}
        self.place_backward()
        self.place_sums()
        needed = self.needs()
        parts = self.gradient_parts()
        owners = self.owners(parts)
        stages = tuple(self.stage(s, needed, parts, owners) for s in range(self.count))
        return Stages(stages, owners, parts, tuple(FREE if h == FREE else max(h, FREE) for h in self.home))

    def free_values(self) -> set[int]:
        """Values that every stage can make on its own: of inputs alone, or one parameter seen through views."""
        roots = parameter_roots(self.program)
        pure = {i.value for i in self.program.inputs if i.kind not in ("parameter", "tangent")}
        free = pure | {i.value for i in self.program.inputs if i.kind == "parameter"}
        for node, values in zip(self.program.nodes, self.reads, strict=True):
            made = {v for v in node.outputs if v >= 0}
            if pure.issuperset(values):
                pure |= made
                free |= made
            elif node.outputs[0] in roots and free.issuperset(values):
                free |= made
        return free

    def is_free(self, index: int) -> bool:
        """True of a node that every stage runs that reads it."""
        node = self.program.nodes[index]
        return node.op == HUB or all(v < 0 or v in self.free for v in node.outputs)

    def forward_values(self) -> Iterator[int]:
        """Values that a forward node of some stage makes."""
        for index, node in enumerate(self.program.nodes):
            if node.phase == "forward" and self.home[index] != FREE:
                yield from (v for v in node.outputs if v >= 0)

    def forward_stages(self, value: int) -> Iterator[int]:
        """Where forward has the value: the stages that make and read it."""
        for index in (self.producer[value], *self.readers.get(value, ())):
            if self.program.nodes[index].phase == "forward" and self.home[index] != FREE:
                yield self.home[index]

    def place_forward(self) -> None:
        for index, node in enumerate(self.program.nodes):
            if node.phase != "forward" or self.is_free(index):
                continue
            stage = self.given[index]
            if not 0 <= stage < self.count:
                raise PlanFileError(f"{node.op} is in stage {stage} of {self.count}", where=node.module)
            for value in self.reads[index]:
                if value not in self.free and self.home[self.producer[value]] > stage:
                    raise PlanFileError(
                        f"{node.op} is in stage {stage} and reads what stage {self.home[self.producer[value]]} makes",
                        where=node.module, way_out="cut the program where values only go forward",
                    )
            self.home[index] = stage

    def place_backward(self) -> None:
        """Stages of backward nodes: see the module's docstring; ``lowest`` is what keeps every later node possible."""
        nodes, last = self.program.nodes, self.count - 1
        named = self.stages_by_name()
        gradients: set[int] = set(self.tangents)  # what depends on a tangent
        lowest = [0] * len(nodes)
        # of nodes that depend on no gradient, from which stage to which they could run; the same of forward values
        span = {v: (self.home[self.producer[v]], self.reach[v]) for v in self.forward_values()}
        backward = [i for i, n in enumerate(nodes) if n.phase == "backward" and not self.is_free(i)]
        for index in backward:
            spans = [span[v] for v in self.reads[index] if v in span]
            lowest[index] = max((low for low, _ in spans), default=0)
            if gradients.isdisjoint(self.reads[index]):
                both = (lowest[index], min((high for _, high in spans), default=last))
                span.update((v, both) for v in nodes[index].outputs if v >= 0)
            else:
                gradients.update(v for v in nodes[index].outputs if v >= 0)
        for index in reversed(backward):
            for value in nodes[index].outputs:
                for reader in self.readers.get(value, ()):
                    lowest[index] = max(lowest[index], lowest[reader])
        late = []
        for index in backward:
            if gradients.isdisjoint(self.reads[index]):
                late.append(index)
                continue
            made = [self.home[self.producer[v]] for v in self.reads[index] if v in gradients - self.tangents]
            reach = [span[v][1] for v in self.reads[index] if v in span]
            highest = min((*made, *reach, last))
            wanted = max((s for s in named.get(_place(nodes[index]), ()) if s <= highest), default=highest)
            self.home[index] = max(lowest[index], wanted)
        for index in reversed(late):  # where it is read
            readers = [self.home[r] for v in nodes[index].outputs for r in self.readers.get(v, ())]
            self.home[index] = max((lowest[index], *readers)) if readers else lowest[index]

    def stages_by_name(self) -> dict[tuple[str, str], set[int]]:
        """(module, line) -> the stages in which forward runs an op of it: its backward ops belong to the last of them
        that they can run in."""
        found: dict[tuple[str, str], set[int]] = {}
        for index, node in enumerate(self.program.nodes):
            if node.phase == "forward" and self.home[index] != FREE:
                found.setdefault(_place(node), set()).add(self.home[index])
        return found

    def place_sums(self) -> None:
        """Mark sums of one parameter's gradients that come from several stages; see :data:`_SHARED`."""
        for output in self.program.outputs:
            if output.kind != "gradient":
                continue
            spine, leaves = self.sum_of(output.value)
            homes = {self.home[self.producer[v]] if v in self.producer else FREE for v in leaves}
            if len(homes) > 1 and FREE not in homes:
                for index in spine:
                    self.home[index] = _SHARED

    def sum_of(self, value: int) -> tuple[list[int], list[int]]:
        """(nodes that only add and show ``value``, values that are added)."""
        spine: list[int] = []
        leaves: list[int] = []
        todo, adds = [value], False
        while todo:
            one = todo.pop()
            one = self.base.get(one, one)
            index = self.producer.get(one, -1)
            uses = len(self.readers.get(one, ())) + self.leaving.get(one, 0)
            node = self.program.nodes[index] if index >= 0 else None
            if node is None or uses > 1 or node.phase != "backward" or self.home[index] == FREE:
                leaves.append(one)
            elif node.op == _ADD and isinstance(node.args[1], Ref) and node.args[2] == 1:
                adds = True
                spine.append(index)
                todo += self.reads[index]
            elif node.op in _LINEAR and not adds:
                spine.append(index)
                todo += self.reads[index]
            else:
                leaves.append(one)
        return spine, leaves

    def needs(self) -> dict[int, tuple[int, int]]:
        """Per value that is made in one stage, (the stage, the furthest stage that reads it)."""
        found: dict[int, tuple[int, int]] = {}
        for index, node in enumerate(self.program.nodes):
            home = self.home[index]
            if home < 0:
                continue
            furthest = max if node.phase == "forward" else min
            for value in node.outputs:
                if value >= 0:
                    stages = [self.home[r] for r in self.readers.get(value, ()) if self.home[r] >= 0]
                    found[value] = (home, furthest((home, *stages)))
        return found

    def gradient_parts(self) -> tuple[tuple[int, ...], ...]:
        """Per input, the stages in which it has a gradient, ascending."""
        gradients = {o.name: o.value for o in self.program.outputs if o.kind == "gradient"}
        found: list[tuple[int, ...]] = []
        for entry in self.program.inputs:
            value = gradients.get(entry.name, -1) if entry.kind == "parameter" else -1
            value = self.base.get(value, value)
            if value not in self.producer:
                # a tangent, or nothing
                found.append((0,) if value >= 0 else ())
                continue
            home = self.home[self.producer[value]]
            if home == _SHARED:
                found.append(tuple(sorted({self.home[self.producer[v]] for v in self.sum_of(value)[1]})))
            else:
                found.append((max(home, 0),))
        return tuple(found)

    def owners(self, parts: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        """A parameter's stage: the first that has a gradient of it, else the first that reads it."""
        using: dict[int, int] = {}
        for stage in range(self.count - 1, -1, -1):
            wanted = self.wanted_inputs(stage)
            using.update((i, stage) for i, e in enumerate(self.program.inputs) if e.value in wanted)
        return tuple(
            -1 if entry.kind != "parameter" else parts[i][0] if parts[i] else using.get(i, 0)
            for i, entry in enumerate(self.program.inputs)
        )

    def nodes_in(self, stage: int) -> tuple[set[int], set[int]]:
        """(nodes that the stage runs, values that they read)."""
        nodes: set[int] = set()
        values: set[int] = set()
        outputs = {o.value for o in self.program.outputs if self.stage_of_output(o) == stage}
        for index in range(len(self.program.nodes) - 1, -1, -1):
            made = self.program.nodes[index].outputs
            if self.home[index] == _SHARED:  # of a sum over stages what this one has
                values.update(
                    v for v, base in zip(node_inputs(self.program.nodes[index]), self.reads[index], strict=True)
                    if base in self.producer and self.home[self.producer[base]] == stage
                )
            mine = self.home[index] == stage or (
                self.home[index] == FREE and any(v in values or v in outputs for v in made)
            )
            if mine:
                nodes.add(index)
                values.update(node_inputs(self.program.nodes[index]))
        return nodes, values | outputs

    def wanted_inputs(self, stage: int) -> set[int]:
        return self.nodes_in(stage)[1]

    def stage_of_output(self, output: Output) -> int:
        """Where an output leaves; of one that every stage could make: the stage the program was given, or the first."""
        index = self.producer.get(self.base.get(output.value, output.value))
        if index is None:
            return 0
        if self.home[index] == FREE:
            return min(max(self.given[index], 0), self.count - 1) if (
                self.program.nodes[index].phase == "forward" and output.kind != "gradient") else 0
        return self.home[index]

    def stage(
        self, stage: int, needed: dict[int, tuple[int, int]], parts: tuple[tuple[int, ...], ...],
        owners: tuple[int, ...],
    ) -> Stage:
        """Build one stage's program."""
        nodes, wanted = self.nodes_in(stage)
        forward = {v for v, (home, to) in needed.items() if home < to}
        received = sorted(v for v in forward if needed[v][0] < stage <= needed[v][1])
        sent = sorted(v for v in forward if needed[v][0] <= stage < needed[v][1])
        backward = {v for v, (home, to) in needed.items() if to < home}
        gradients_in = sorted(v for v in backward if needed[v][1] <= stage < needed[v][0])
        gradients_out = sorted(v for v in backward if needed[v][1] < stage <= needed[v][0])
        builder = _Builder(self.program)
        for position, entry in enumerate(self.program.inputs):
            if entry.value in wanted or owners[position] == stage or stage in parts[position]:
                builder.enter(entry, position)
        first = len(builder.inputs)
        for value in received:
            builder.enter(Input(value, "input", f"value {value} of the stage before"), -1)
        for value in gradients_in:
            builder.enter(Input(value, "tangent", f"value {value} of the next stage"), -1)
        for index in range(len(self.program.nodes)):
            if index in nodes:
                builder.add(index)
            elif self.home[index] == _SHARED:
                builder.add_part(index)
        for position, output in enumerate(self.program.outputs):
            producer = self.producer.get(output.value, -1)
            shared = producer >= 0 and self.home[producer] == _SHARED
            if (output.value in builder.number) if shared else self.stage_of_output(output) == stage:
                builder.leave(output, position)
        last = len(builder.outputs)
        for value in sent:
            builder.leave(Output(value, "output", f"value {value} for the next stage"), -1)
        for value in gradients_out:
            builder.leave(Output(value, "output", f"value {value} for the stage before"), -1)
        return Stage(
            builder.program(), tuple(builder.nodes_of), tuple(builder.values), tuple(builder.inputs_of),
            tuple(builder.outputs_of), tuple(range(first, first + len(received))),
            tuple(range(last, last + len(sent))),
            tuple(range(first + len(received), first + len(received) + len(gradients_in))),
            tuple(range(last + len(sent), last + len(sent) + len(gradients_out))),
        )


def _place(node: Node) -> tuple[str, str]:
    return node.module, node.source


class _Builder:
    """Collects a stage's program; values are numbered as they come."""

    def __init__(self, whole: Program) -> None:
        self.whole = whole
        self.number: dict[int, int] = {}  # whole value -> the stage's
        self.values: list[int] = []
        self.inputs: list[Input] = []
        self.inputs_of: list[int] = []
        self.nodes: list[Node] = []
        self.nodes_of: list[int] = []
        self.outputs: list[Output] = []
        self.outputs_of: list[int] = []

    def define(self, value: int) -> int:
        self.values.append(value)
        self.number[value] = len(self.values) - 1
        return self.number[value]

    def enter(self, entry: Input, position: int) -> None:
        self.inputs.append(msgspec.structs.replace(entry, value=self.define(entry.value)))
        self.inputs_of.append(position)

    def add(self, index: int) -> None:
        node = self.whole.nodes[index]
        renamed: dict[int, Arg] = {v: Ref(self.number[v]) for v in node_inputs(node)}
        args = tuple(map_refs(arg, renamed) for arg in node.args)
        outputs = tuple(self.define(v) if v >= 0 else -1 for v in node.outputs)
        self.nodes.append(msgspec.structs.replace(node, args=args, outputs=outputs))
        self.nodes_of.append(index)

    def add_part(self, index: int) -> None:
        """A node of a sum over stages: of what this stage has of its operands."""
        node = self.whole.nodes[index]
        have = [v for v in node_inputs(node) if v in self.number]
        if len(have) == len(node_inputs(node)):
            self.add(index)
        elif have:
            self.number[node.outputs[0]] = self.number[have[0]]

    def leave(self, output: Output, position: int) -> None:
        self.outputs.append(msgspec.structs.replace(output, value=self.number[output.value]))
        self.outputs_of.append(position)

    def program(self) -> Program:
        whole = self.whole
        return Program(
            types=tuple(whole.types[v] for v in self.values),
            inputs=tuple(self.inputs), nodes=tuple(self.nodes), outputs=tuple(self.outputs),
            dims=tuple(whole.dims[v] for v in self.values) if whole.dims else (),
            constants=whole.constants, time=self.time(),
        )

    def time(self) -> Microbatches:
        """How the stage repeats; one that runs once is a step of one microbatch."""
        time = self.whole.time
        once = frozenset(time.once) if time is not None else frozenset()
        cuts = time.inputs if time is not None else (-1,) * len(self.whole.inputs)
        joins = time.outputs if time is not None else tuple(
            "sum" if o.kind == "gradient" else "same" for o in self.whole.outputs
        )
        return Microbatches(
            1 if time is None else time.count, "exact" if time is None else time.semantics,
            tuple(n for n, index in enumerate(self.nodes_of) if index in once),
            # what another stage sends is each microbatch's own
            tuple(cuts[i] if i >= 0 else 0 for i in self.inputs_of),
            tuple(joins[o] if o >= 0 else "same" for o in self.outputs_of),
        )
