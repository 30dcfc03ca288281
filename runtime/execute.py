"""LocalProgram -> FX graph modules that run one rank's forward and backward.

Generated identifiers only (``v0``, ``v1`` ...): nothing of a plan file becomes source text except numbers and the
quoted string arguments of ops. Collectives start where the program has them and finish right before their first use (an
op that reads a result, or a step that only waits), so whatever stands between the two overlaps. Both functions take ONE
list of tensors and empty it: an activation is freed as soon as backward has used it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from fxpar.plans.program import Program
from fxpar.runtime import collectives as comm
from fxpar.runtime.groups import MeshGroups
from fxpar.runtime.interpret import operator_of
from fxpar.runtime.local import AddStep, CollectiveStep, Cut, Halo, LocalProgram, LocalStep, OpStep, Swap, WaitStep
from fxpar.runtime.op_call import call_arguments
from fxpar.runtime.rewrite.partition import Halves, partition

Boxed = Callable[[list[Any]], tuple[Any, ...]]
"""Takes a list of tensors, empties it, returns the results."""


@dataclass(frozen=True)
class Executable:
    """Both halves as code; ``halves`` says what goes in and out."""

    halves: Halves
    forward: Boxed
    backward: Boxed


def build(program: Program, local: LocalProgram, groups: MeshGroups) -> Executable:
    """Code for the rewritten local program of this rank."""
    halves = partition(program, local)
    return Executable(halves, graph_of(halves.forward, groups), graph_of(halves.backward, groups))


def graph_of(local: LocalProgram, groups: MeshGroups) -> fx.GraphModule:
    """One half as a boxed GraphModule."""
    return _Writer(local, groups).module()


class BoxedCodeGen(CodeGen):
    """The generated function takes one list and clears it."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [text.split(":")[0].split("=")[0].strip() for text in free_vars if text != "self"]
        lines = [f"def {self._func_name}(self, boxed){maybe_return_annotation}:"]
        if names:
            lines += [f"    {', '.join(names)}, = boxed", "    boxed.clear()"]
        return "\n".join(lines)


class _Writer:
    """Writes one graph; used once."""

    def __init__(self, local: LocalProgram, groups: MeshGroups) -> None:
        self.local, self.groups = local, groups
        self.graph = fx.Graph()
        self.graph.set_codegen(BoxedCodeGen())
        self.known: dict[int, fx.Node] = {}
        self.pending: dict[int, Callable[[], None]] = {}
        self.count = 0

    def module(self) -> fx.GraphModule:
        for value in self.local.inputs:
            self.known[value] = self.graph.placeholder(self.name())
        for step in self.local.steps:
            if isinstance(step, OpStep):
                self.op(step)
            elif isinstance(step, LocalStep):
                self.local_step(step)
            elif isinstance(step, AddStep):
                total = self.value(step.total)
                self.known[step.output] = self.call(comm.add_in_place, total, self.value(step.value))
            elif isinstance(step, WaitStep):
                for value in step.values:
                    self.value(value)
            else:
                self.collective(step)
        self.graph.output(tuple(self.value(v) for v in self.local.outputs))
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> fx.Node:
        return self.graph.create_node("call_function", function, args, named, name=self.name())

    def value(self, value: int) -> fx.Node:
        """The node of a local value; a collective that is under way is waited for."""
        if value in self.pending:
            self.pending.pop(value)()
        return self.known[value]

    def op(self, step: OpStep) -> None:
        for value in step.operands:
            self.value(value)
        positional, named = call_arguments(step.op, step.args, self.known, self.groups.device)
        node = self.call(operator_of(step.op), *positional, **named)
        returns = operator_of(step.op)._schema.returns
        if len(returns) == 1 and not str(returns[0].type).startswith("List"):
            self.known[step.outputs[0]] = node
            return
        for position, value in enumerate(step.outputs):
            if value >= 0:
                self.known[value] = self.call(operator.getitem, node, position)

    def local_step(self, step: LocalStep) -> None:
        operand = self.value(step.value)
        if step.kind == "slice":
            shape = self.local.types[step.output].shape
            node = self.call(comm.take_slice, operand, step.outer, step.start, step.length, step.inner, shape)
        else:
            node = operand if step.keep else self.call(comm.zeros_alike, operand)
        self.known[step.output] = node

    def collective(self, step: CollectiveStep) -> None:
        operands = [self.value(v) for v in step.values]
        group, me = self.groups.names[step.axis], self.local.coords[step.axis]
        shapes = [self.local.types[v].shape for v in step.outputs]
        if step.kind == "all_to_all":
            self.exchange(step, operands[0], me, group)
            return
        if step.kind in ("halo", "halo_sum"):
            self.halo(step, operands[0], me, group)
            return
        cuts = [(g.outer, g.lengths, g.inner) for g in step.geometries if isinstance(g, Cut)]
        if step.kind == "all_reduce":
            buffer = self.call(comm.start_all_reduce, operands, step.reduce, group)
            self.later(step, lambda: self.call(comm.finish_all_reduce, buffer, shapes, step.dtype))
        elif step.kind == "all_gather":
            buffer = self.call(comm.start_all_gather, operands, cuts, me, group)
            self.later(step, lambda: self.call(comm.finish_all_gather, buffer, cuts, shapes, step.dtype))
        else:
            buffer = self.call(comm.start_reduce_scatter, operands, cuts, step.reduce, group)
            self.later(step, lambda: self.call(comm.finish_reduce_scatter, buffer, cuts, me, shapes, step.dtype))

    def exchange(self, step: CollectiveStep, operand: fx.Node, me: int, group: str) -> None:
        swap = step.geometries[0]
        assert isinstance(swap, Swap)
        numbers = ((swap.outer, swap.middle, swap.inner), swap.joined, swap.cut, swap.joined_first, me)
        buffer = self.call(comm.start_all_to_all, operand, *numbers, group)
        shape = self.local.types[step.outputs[0]].shape
        self.later(step, lambda: self.call(comm.finish_all_to_all, buffer, *numbers, shape, step.dtype))

    def halo(self, step: CollectiveStep, operand: fx.Node, me: int, group: str) -> None:
        halo = step.geometries[0]
        assert isinstance(halo, Halo)
        fill = halo.fill if math.isfinite(halo.fill) else self.call(float, str(halo.fill))
        numbers = ((halo.outer, halo.inner), halo.lengths, halo.starts, halo.ends, fill)
        summed, shape = step.kind == "halo_sum", self.local.types[step.outputs[0]].shape
        buffer = self.call(comm.start_halo, operand, numbers, me, summed, group)
        self.later(step, lambda: self.call(comm.finish_halo, buffer, operand, numbers, me, summed, shape, step.dtype))

    def later(self, step: CollectiveStep, finish: Callable[[], fx.Node]) -> None:
        """Finish when the first of the step's results is read; ``finish`` gives the list of all results."""

        def once() -> None:
            for value in step.outputs:
                self.pending.pop(value, None)
            row = finish()
            for position, value in enumerate(step.outputs):
                self.known[value] = self.call(operator.getitem, row, position)

        for value in step.outputs:
            self.pending[value] = once
