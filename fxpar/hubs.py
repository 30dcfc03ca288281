"""Hubs: a reshard that several ops of one phase need is made, held and paid for once.

    x ──▶ mm        x ──▶ hub ──▶ mm
      └─▶ mm    =>            └─▶ mm

Forward and backward get a hub each: a layout that only the backward reads should not live through the forward. What a
parameter is read as in both has a hub in both, read once or not: its gathered copy may be kept from one to the other
(see ``fxpar.plans.lifetimes``).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fxpar.plans.lifetimes import parameter_roots
from fxpar.plans.program import Arg, Node, Program, Ref, map_refs, node_inputs
from fxpar.rules.ops.hub import HUB


def shared_values(program: Program) -> dict[tuple[int, str], list[int]]:
    """(value, phase) -> the nodes of that phase that read the value, where there are at least two, or where the value
    is a parameter (itself, cast or viewed) that the other phase reads, too, and no hub stands there yet."""
    readers: dict[tuple[int, str], list[int]] = {}
    already = {v for node in program.nodes if node.op == HUB for v in node.outputs}
    for index, node in enumerate(program.nodes):
        for value in dict.fromkeys(node_inputs(node)):
            if value not in already:
                readers.setdefault((value, node.phase), []).append(index)
    stored = parameter_roots(program)
    both = {v for v, _ in readers if v in stored and (v, "forward") in readers and (v, "backward") in readers}
    return {
        (value, phase): found for (value, phase), found in readers.items()
        if len(found) > 1 or (value in both and program.nodes[found[0]].op != HUB)
    }


def insert_hubs(program: Program) -> Program:
    """The program with a hub, right before the first reader, for every value of :func:`shared_values`.

    The readers of that phase read the hub's result; what leaves the program stays as it is. Values are renumbered in
    definition order; ``dims``, if analysed, follow. Applying it again changes nothing.
    """
    shared = shared_values(program)
    before: dict[int, list[int]] = {}
    for (value, _), readers in sorted(shared.items(), key=lambda item: item[0]):
        before.setdefault(readers[0], []).append(value)
    producer = {v: node for node in program.nodes for v in node.outputs if v >= 0}
    stored = parameter_roots(program)

    origin: list[int] = []  # per new value, the old value that it equals
    renumbered: dict[int, int] = {}
    hub_of: dict[tuple[int, str], int] = {}

    def define(old: int) -> int:
        origin.append(old)
        return len(origin) - 1

    for old in _entering(program):
        renumbered[old] = define(old)
    nodes: list[Node] = []
    for index, node in enumerate(program.nodes):
        for value in before.get(index, ()):
            # what a parameter is cast to belongs to who reads it
            placed = node if value in stored else producer.get(value, node)
            result = define(value)
            hub_of[value, node.phase] = result
            nodes.append(Node(HUB, (Ref(renumbered[value]),), (result,), node.phase, placed.module, placed.source))
        replace: dict[int, Arg] = {v: Ref(hub_of.get((v, node.phase), renumbered[v])) for v in node_inputs(node)}
        for old in node.outputs:
            if old >= 0:
                renumbered[old] = define(old)
        nodes.append(
            msgspec.structs.replace(
                node,
                args=tuple(map_refs(arg, replace) for arg in node.args),
                outputs=tuple(renumbered[v] if v >= 0 else -1 for v in node.outputs),
            )
        )
    return msgspec.structs.replace(
        program,
        types=tuple(program.types[v] for v in origin),
        dims=tuple(program.dims[v] for v in origin) if program.dims else (),
        inputs=tuple(msgspec.structs.replace(i, value=renumbered[i.value]) for i in program.inputs),
        nodes=tuple(nodes),
        outputs=tuple(
            msgspec.structs.replace(o, value=renumbered[o.value]) if o.value >= 0 else o for o in program.outputs
        ),
    )


def _entering(program: Program) -> Sequence[int]:
    """Values that no node makes, in order."""
    made = {v for node in program.nodes for v in node.outputs}
    return [v for v in range(len(program.types)) if v not in made]
