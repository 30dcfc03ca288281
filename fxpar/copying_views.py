"""Views by name that are copies in truth: a reshape of what was transposed or expanded.

    transpose [b h s d] ── view [b s (h d)]     no strides give this: the elements are written out again

Their results are storages of their own; kept for backward, they take memory beside what they look at.
"""

from __future__ import annotations

from fxpar.cost.op_work import is_view_op
from fxpar.plans.program import Arg, Node, Program, Ref, map_refs, node_inputs
from fxpar.rules.ops.hub import HUB
from fxpar.strides import Strided, contiguous, viewed


def copying_views(program: Program) -> frozenset[int]:
    """Forward nodes whose op is a view and whose result, of the whole tensors on one device, is a copy."""
    lies: dict[int, Strided] = {}
    found = set()
    for index, node in enumerate(program.nodes):
        if node.phase != "forward" or not (reads := node_inputs(node)):
            continue
        view = is_view_op(node.op)
        if not view and not any(v in lies for v in reads):
            continue
        if node.op == HUB:
            if reads[0] in lies:
                lies[node.outputs[0]] = lies[reads[0]]
            continue
        if not view and not _keeps_order(node):
            continue
        for number, (value, (result, shares)) in enumerate(zip(node.outputs, _made(program, node, lies), strict=True)):
            if value >= 0 and not result.in_order:
                lies[value] = result
            if view and not number and not shares:
                found.add(index)
    return frozenset(found)


def _keeps_order(node: Node) -> bool:
    """True where results may lie as operands do; other ops make what is in order."""
    return node.op.startswith("aten.") and len(node.outputs) == 1


def _made(program: Program, node: Node, lies: dict[int, Strided]) -> list[tuple[Strided, bool]]:
    reads = node_inputs(node)
    numbers: dict[int, Arg] = {v: Ref(i) for i, v in enumerate(reads)}
    args = tuple(map_refs(arg, numbers) for arg in node.args)
    kinds = [program.types[v] for v in reads]
    operands = tuple(
        lies.get(v) or Strided(kind.shape, contiguous(kind.shape), kind.dtype)
        for v, kind in zip(reads, kinds, strict=True)
    )
    return viewed(node.op, args, operands, len(node.outputs))
