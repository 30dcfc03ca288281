"""How often a step pays what: of a program that repeats in time, once or by every microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxpar.layers import Classes
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, node_inputs
from fxpar.solver.problem import FORBIDDEN, IntArray


@dataclass(frozen=True)
class InTime:
    """What a program that repeats does by every microbatch.

    ``reduce_each``: gradients are brought into their layout by each, else they are added up as backward leaves them and
    brought there once. ``hold``: gathered copies of parameters are made once and stay, else each makes its own.
    """

    reduce_each: bool = False
    hold: bool = False

    def decided(self, program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """``Decisions.reduce_each`` and ``Decisions.held``."""
        gradients = [i for i, o in enumerate(program.outputs) if o.kind == "gradient"] if self.reduce_each else ()
        held = [i for i, e in enumerate(program.inputs) if e.kind == "parameter"] if self.hold else ()
        return tuple(gradients), tuple(held)


ALONE = InTime()
"""Gradients are reduced once a step, copies of parameters made by every microbatch."""


def in_time_of(decisions: Decisions) -> InTime:
    """What decisions say of time."""
    return InTime(bool(decisions.reduce_each), bool(decisions.held))


def ways_in_time(program: Program, zero: int | None) -> tuple[InTime, ...]:
    """What may be done in time under ``--zero``, the fastest and largest first: ZeRO-1 and -2 hold the copies of
    parameters through the step, ZeRO-2 and -3 reduce gradients by every microbatch."""
    if program.time is None:
        return (ALONE,)
    if zero is None:
        return ALONE, InTime(reduce_each=True)
    return (InTime(zero >= 2, zero in (1, 2)),)


def made_by_hand(program: Program, parameters_cut: bool) -> InTime:
    """What people do who store parameters cut, or whole."""
    return InTime(reduce_each=parameters_cut and program.time is not None)


class Often:
    """Per class of a formulation."""

    def __init__(self, program: Program, classes: Classes, in_time: InTime) -> None:
        self.count = program.microbatches
        once = set(program.time.once) if program.time is not None else set()
        self.parameters: set[int] = set()
        if in_time.hold:
            held = {i.value for i in program.inputs if i.kind == "parameter"}
            for index, node in enumerate(program.nodes):
                reads = node_inputs(node)
                if reads and held.issuperset(reads):
                    held.update(node.outputs)
                    once.add(index)
            self.parameters = {c for i, c in zip(program.inputs, classes.inputs, strict=True) if i.kind == "parameter"}
        mixed = {c for n, c in enumerate(classes.nodes) if n not in once}
        self.once = {classes.nodes[n] for n in once} - mixed
        self.gradients = self.count if in_time.reduce_each else 1

    def costs(self, c: int, row: IntArray) -> IntArray:
        """The costs of a class' states in a step."""
        if self.count == 1 or c in self.once:
            return row
        return np.where(row >= FORBIDDEN, FORBIDDEN, self.count * row)

    def edge(self, maker: int, reader: int, read: bool) -> int:
        """How often a step makes the reshard between two classes; ``read`` by a node, else left as a gradient."""
        if not read:
            return self.gradients
        # a reader of a held copy that reads more runs by every microbatch, but what it reads is brought along once
        once = maker in self.once or reader in self.once or maker in self.parameters
        return 1 if once else self.count
