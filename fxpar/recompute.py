"""Rematerialisation: which forward nodes backward runs again, and what is then saved.

Two levels beside none. ``cheap``: inside repeated layers, everything but products, convolutions and attention runs
again. ``layers``: everything inside a layer runs again. Values that leave their layer are always stored, which stops
chains of recomputation at the layer border.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fxpar.plans.program import Program, node_inputs
from fxpar.rules.ops.hub import HUB

LEVELS = ("none", "cheap", "layers")
_LAYER = re.compile(r"^(.*?(?:^|\.)\d+)(?:\.|$)")
_HEAVY = frozenset({
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.convolution.default",
    "fxpar.attention.default", "fxpar.experts.default",
})


def layer_of(module: str) -> str | None:
    """``"model.layers.3.mlp.up"`` -> ``"model.layers.3"``: up to the first number; None outside numbered modules."""
    found = _LAYER.match(module)
    return found.group(1) if found else None


def recompute_nodes(program: Program, level: str) -> tuple[int, ...]:
    """Forward nodes that backward runs again at a level of :data:`LEVELS`."""
    if level == "none":
        return ()
    layers = [layer_of(n.module) for n in program.nodes]
    leaves = {o.value for o in program.outputs}
    producer = {v: i for i, n in enumerate(program.nodes) for v in n.outputs if v >= 0}
    for index, node in enumerate(program.nodes):
        if node.phase == "forward":
            leaves.update(v for v in node_inputs(node) if v in producer and layers[producer[v]] != layers[index])
    for node in reversed(program.nodes):
        if node.op == HUB and node.outputs[0] in leaves:
            leaves.update(node_inputs(node))
    return tuple(
        index for index, node in enumerate(program.nodes)
        if node.phase == "forward" and layers[index] is not None
        and (level == "layers" or node.op not in _HEAVY)
        and leaves.isdisjoint(node.outputs)
    )


@dataclass(frozen=True)
class Saved:
    """``values``: forward values kept for backward (program inputs are stored anyway and not counted); ``again``:
    forward nodes that backward really runs again."""

    values: tuple[int, ...]
    again: tuple[int, ...]


def saved_values(program: Program, recompute: tuple[int, ...], is_view: Callable[[int], bool]) -> Saved:
    """What backward needs of forward: followed through views (they share storage) and through recomputed nodes.

    A view that is not recomputed was made in forward: it keeps what it looks at, recomputed or not.
    """
    producer = {v: n for n, node in enumerate(program.nodes) for v in node.outputs if v >= 0}
    repeated = frozenset(recompute)
    queue = [v for node in program.nodes if node.phase == "backward" for v in node_inputs(node)
             if v in producer and program.nodes[producer[v]].phase == "forward"]
    kept: dict[int, None] = {}
    again: dict[int, None] = {}
    seen: set[int] = set()
    while queue:
        value = queue.pop()
        if value in seen:
            continue
        seen.add(value)
        node = producer.get(value)
        if node is None:
            continue
        if node in repeated:
            again[node] = None
            queue += node_inputs(program.nodes[node])
        else:
            while value in producer and is_view(producer[value]):
                value = node_inputs(program.nodes[producer[value]])[0]
            if value in producer:
                kept[value] = None
    return Saved(tuple(sorted(kept)), tuple(sorted(again)))
