"""Rematerialisation by rule: which forward nodes backward runs again when nobody weighs them one by one.

``cheap``: inside repeated layers, everything but products, convolutions and attention runs again. ``layers``:
everything inside a layer runs again (``--recompute on``). Values that leave their layer are always stored, which stops
chains of recomputation at the layer border. The solver's own choice is made per node: see ``modes``.
"""

from __future__ import annotations

import re

from fxpar.cost.op_work import is_view_op
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
        # a hub or a view that leaves the layer is kept as what it is made of
        if (node.op == HUB or is_view_op(node.op)) and not leaves.isdisjoint(node.outputs):
            leaves.update(node_inputs(node)[:1])
    return tuple(
        index for index, node in enumerate(program.nodes)
        if node.phase == "forward" and layers[index] is not None
        and (node.op == HUB or ((level == "layers" or node.op not in _HEAVY) and leaves.isdisjoint(node.outputs)))
    )
