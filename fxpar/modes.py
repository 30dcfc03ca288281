"""Whether what a forward node makes is there in backward: dropped, kept, or made again.

    x ── mm ── gelu ── mm     kept:   mm's result stays in memory until backward has read it
          │      │            again:  backward runs gelu a second time, from mm's result
        kept   again          dropped: nothing in backward wants it

A view shares the storage of what it looks at and is kept for nothing where that is kept. A hub (a shared reshard) is
stored only as the copy of a parameter that backward reads, too (``HELD``, see ``lifetimes``); else, where its readers
run again, its reshard is repeated, from a kept operand (``KEPT``) or from one that is made again itself (``AGAIN``).
What is made again never reaches across the border of a repeated layer: that would chain the recomputation of one layer
to all before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from fxpar.cost.op_work import is_view_op
from fxpar.plans.lifetimes import hub_partners
from fxpar.plans.program import Node, Program, node_inputs
from fxpar.recompute import layer_of
from fxpar.rules.ops.hub import HUB
from fxpar.solver.graph import BoolArray
from fxpar.solver.problem import FORBIDDEN, IntArray

DROPPED, KEPT, AGAIN, HELD = 0, 1, 2, 3
Kind = Literal["op", "view", "hub"]
Part = Literal["first", "again", "late"]
Reuse = Literal["never", "free", "always"]
"""Whether copies of parameters are kept from forward to backward: none, those that pay and fit, all."""
# ops of other libraries may hide what is not the same twice
_REPEATABLE = ("aten.", "fxpar.")


def kind_of(node: Node) -> Kind:
    """How a node holds memory."""
    if node.op == HUB:
        return "hub"
    return "view" if node_inputs(node) and is_view_op(node.op) else "op"


@dataclass(frozen=True)
class Offered:
    """``modes[n]``: the modes node ``n`` may take (backward nodes: none, but hubs that may read a copy). ``wanted``:
    forward values that backward, or a node that runs again, may read."""

    modes: tuple[tuple[int, ...], ...]
    wanted: frozenset[int]


def offered_modes(program: Program, copies: Mapping[int, int] = MappingProxyType({})) -> Offered:
    """What every forward node may do, when all is free.

    Args:
        copies: backward hub -> forward hub, where the forward hub's copy may be kept.
    """
    keeping = frozenset(copies.values())
    late: set[int] = set()
    read: set[int] = set()
    for index, node in enumerate(program.nodes):
        if node.phase == "backward":
            read.update(node_inputs(node))
            if index not in copies:
                late.update(node_inputs(node))
    made = {v for n in program.nodes for v in n.outputs}
    modes: list[tuple[int, ...]] = [(DROPPED, HELD) if n in copies else () for n in range(len(program.nodes))]
    wanted: set[int] = set()
    for index in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[index]
        if node.phase != "forward":
            continue
        must = not late.isdisjoint(node.outputs)
        wanted.update(v for v in node.outputs if v in read)
        held = (HELD,) if index in keeping else ()
        if not must and wanted.isdisjoint(node.outputs):
            modes[index] = (DROPPED, *held)
            continue
        # what a hub reads from outside is always there
        again = node.op.startswith(_REPEATABLE) and (node.op != HUB or not made.isdisjoint(node_inputs(node)))
        modes[index] = (*(() if must else (DROPPED,)), KEPT, *((AGAIN,) if again else ()), *held)
        if again or kind_of(node) != "op":
            wanted.update(node_inputs(node))
    return Offered(tuple(modes), frozenset(wanted))


def pinned_modes(
    program: Program, recompute: Sequence[int], reuse: Sequence[int] = ()
) -> tuple[tuple[int, ...], frozenset[int]]:
    """(mode per node, forward values that are really read in backward) when the nodes that run again, and the backward
    hubs that read a copy, are given.

    A hub takes the mode of its operand, listed or not. A view that is not listed keeps what it looks at; that the
    latter is listed as well is not expected here.
    """
    producer = {v: n for n, node in enumerate(program.nodes) for v in node.outputs if v >= 0}
    repeated = frozenset(recompute)
    modes = [DROPPED] * len(program.nodes)
    partners = hub_partners(program) if reuse else {}
    late, held = frozenset(reuse), {partners[n] for n in reuse}
    queue = [v for n, node in enumerate(program.nodes) if node.phase == "backward" and n not in late
             for v in node_inputs(node)]
    seen: set[int] = set()
    hubs: set[int] = set()
    while queue:
        value = queue.pop()
        index = producer.get(value)
        if value in seen or index is None or program.nodes[index].phase != "forward":
            continue
        if index in held:
            continue
        seen.add(value)
        kind = kind_of(program.nodes[index])
        if kind == "hub":
            hubs.add(index)
        else:
            modes[index] = AGAIN if index in repeated else KEPT
        if kind != "op" or index in repeated:
            queue += node_inputs(program.nodes[index])
    for index in sorted(hubs):
        operand = producer.get(node_inputs(program.nodes[index])[0])
        modes[index] = AGAIN if operand is not None and modes[operand] == AGAIN else KEPT
    for index in held:
        modes[index] = HELD
    return tuple(modes), frozenset(seen)


def times(kind: Kind, mode: int) -> int:
    """How often a node's operands are brought into its layout: twice where that happens in backward too."""
    return 2 if mode == AGAIN or (kind == "hub" and mode == KEPT) else 1


def nodes_to_repeat(program: Program, modes: Sequence[int]) -> tuple[int, ...]:
    """``Decisions.recompute`` of the modes of all nodes."""
    return tuple(
        index for index, (node, mode) in enumerate(zip(program.nodes, modes, strict=True))
        if node.phase == "forward" and times(kind_of(node), mode) == 2
    )


def crosses(program: Program, maker: int, reader: int) -> bool:
    """True when two forward nodes are in different repeated layers."""
    return layer_of(program.nodes[maker].module) != layer_of(program.nodes[reader].module)


@dataclass(frozen=True)
class Pair:
    """The modes at both ends of an edge, state by state.

    ``maker`` is None for a program input (always there), ``reader`` None for a backward node that reads no copy.
    ``kind`` is the reader's; ``of_hub``: the maker is a hub; ``late``: the reader is a backward hub; ``always``: of a
    forward hub every copy is held that is not there already.
    """

    maker: tuple[int, ...] | None
    reader: tuple[int, ...] | None
    kind: Kind = "op"
    crossing: bool = False
    of_hub: bool = False
    late: bool = False
    always: bool = False

    def apply(self, table: IntArray, moves: BoolArray) -> IntArray:
        """``table`` [maker states, reader states] with repeated reshards counted twice and impossible pairs barred;
        ``moves``: where the layouts differ, whatever that costs."""
        maker = np.array(self.maker or (KEPT,) * table.shape[0])[:, None]
        if self.reader is None:
            return np.where(maker == DROPPED, FORBIDDEN, table)
        reader = np.array(self.reader)[None, :]
        if self.late:
            return np.where(reader == HELD, 0, np.where(maker == DROPPED, FORBIDDEN, table))
        there = (maker == KEPT) | (maker == HELD)
        remade = maker == AGAIN if not self.crossing else np.zeros_like(there)
        match self.kind:
            case "op":
                allowed = (reader != AGAIN) | there | remade
            case "view":
                # a kept view of a resharded copy would keep the copy
                kept = there & (table == 0) & ((maker == HELD) if self.of_hub else True)
                allowed = np.where(reader == KEPT, kept, (reader == DROPPED) | there | remade)
            case "hub":
                allowed = np.where(reader == KEPT, there, np.where(reader == HELD, moves, (reader == DROPPED) | remade))
                if self.always:
                    allowed = allowed & ((reader == HELD) | ~moves)
        doubled = (reader == AGAIN) | (reader == KEPT) if self.kind == "hub" else reader == AGAIN
        return np.where(allowed, np.where(doubled & (table < FORBIDDEN), 2 * table, table), FORBIDDEN)


@dataclass(frozen=True)
class Copies:
    """The states of a hub that may read or hold a copy, where what runs again is given.

    ``part``: a forward hub's reshard ("first": what is no move makes no copy), its repetition in backward ("again"), or
    a backward hub's ("late"). ``always``: a copy that is made is held.
    """

    reader: tuple[int, ...]
    part: Part
    always: bool = False

    def apply(self, table: IntArray, moves: BoolArray) -> IntArray:
        """``table`` [maker states, reader states] with what a held copy saves; ``moves`` as for :class:`Pair`."""
        held = np.array(self.reader)[None, :] == HELD
        if self.part == "first":
            return np.where((held & ~moves) | (~held & moves & self.always), FORBIDDEN, table)
        return np.where(held, 0, table)
