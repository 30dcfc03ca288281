"""Shorter programs with the same values.

detach, clone, full slices, views to the same shape, copies of the same type   -> the operand itself
zeros_like, new_full, empty_strided, scalar_tensor, ...                         -> aten.full
transposes of transposes                                                       -> the first operand
view, reshape, _unsafe_view with -1 somewhere                                  -> view to the full shape
x with a slice of x written back into it                                       -> x
nodes nothing reads                                                            -> gone (all ops are pure)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fxpar.capture.numbering import DRAWS
from fxpar.plans.program import Arg, Dtype, Node, Program, Ref, TensorType, map_refs, node_inputs

_IDENTITY_IF_SAME_TYPE = {
    "aten.detach.default",
    "aten.alias.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.lift_fresh_copy.default",
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.expand.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten._to_copy.default",
}
_FILL_LIKE = {
    "aten.zeros_like.default": 0,
    "aten.ones_like.default": 1,
    "aten.empty_like.default": 0,
    "aten.zeros.default": 0,
    "aten.ones.default": 1,
    "aten.new_zeros.default": 0,
    "aten.new_ones.default": 1,
    "aten.new_empty.default": 0,
    "aten.new_empty_strided.default": 0,
    "aten.empty.memory_format": 0,
    "aten.empty_strided.default": 0,
}
_FILL_WITH = {
    "aten.full_like.default": 1,
    "aten.new_full.default": 2,
    "aten.scalar_tensor.default": 0,
    "aten.full.default": 1,
    "aten.fill.Scalar": 1,
}
_SLICE = "aten.slice.Tensor"
_SHAPED = {
    "aten.view.default": "aten.view.default",
    "aten._unsafe_view.default": "aten.view.default",
    "aten.reshape.default": "aten.view.default",
    "aten.expand.default": "aten.expand.default",
}
_READ_BY_WRITE = {"aten.slice_scatter.default": _SLICE, "aten.select_scatter.default": "aten.select.int"}
_SWAPS = {"aten.t.default", "aten.transpose.int"}


def fill(node: Node, kind: TensorType, number: Arg) -> Node:
    """``node`` as ``aten.full``: (size, fill value, dtype, layout, device, pin_memory)."""
    if kind.dtype == "bool":
        number = bool(number)
    args: tuple[Arg, ...] = (kind.shape, number, Dtype(kind.dtype), None, None, None)
    return msgspec.structs.replace(node, op="aten.full.default", args=args)


def takes_all(node: Node, operand: TensorType) -> bool:
    """True for a slice that cuts nothing off."""
    _, dim, start, end, step = node.args
    size = operand.shape[int(dim)] if isinstance(dim, int) else -1
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= size)) and step == 1


def swapped_dims(node: Node, rank: int) -> tuple[int, ...]:
    """The two dims that a transpose exchanges."""
    if node.op == "aten.t.default":
        return (0, 1) if rank == 2 else (0, 0)
    return tuple(sorted(int(dim) % rank for dim in node.args[1:3] if isinstance(dim, int))) if rank else (0, 0)


def canonical(node: Node, types: Sequence[TensorType]) -> Node:
    """The node under the one name its meaning has: fills as ``full``, reshapes as ``view`` with the full shape."""
    result = node.outputs[0]
    if node.op in _FILL_LIKE:
        return fill(node, types[result], _FILL_LIKE[node.op])
    if node.op in _FILL_WITH and not isinstance(node.args[_FILL_WITH[node.op]], Ref):
        return fill(node, types[result], node.args[_FILL_WITH[node.op]])
    if node.op in _SHAPED:
        args = (node.args[0], types[result].shape, *node.args[2:])
        return msgspec.structs.replace(node, op=_SHAPED[node.op], args=args)
    if node.op == "aten.copy.default" and isinstance(node.args[1], Ref):
        # copy(into, from) reads only the type of ``into``.
        source, kind = types[node.args[1].id], types[result]
        if source.shape == kind.shape:
            args = (node.args[1], Dtype(kind.dtype), None, None, None, None, None)
            return msgspec.structs.replace(node, op="aten._to_copy.default", args=args)
        if source.dtype == kind.dtype:
            return msgspec.structs.replace(node, op="aten.expand.default", args=(node.args[1], kind.shape, False))
    return node


def is_neutral(node: Node, dtype: str) -> bool:
    """True for x * 1, x / 1, x ** 1 and, on integers, x + 0."""
    if node.op in ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.pow.Tensor_Scalar"):
        return not isinstance(node.args[1], bool) and node.args[1] == 1
    return node.op in ("aten.add.Tensor", "aten.add.Scalar") and node.args[1] == 0 and dtype.startswith("int")


def operand_it_equals(node: Node, types: Sequence[TensorType], made_by: Mapping[int, Node]) -> Arg:
    """The value that the node's result is known to equal, or None."""
    if not node.args or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0]
    kind = types[source.id]
    if kind == types[node.outputs[0]] and (
        node.op in _IDENTITY_IF_SAME_TYPE
        or (node.op == _SLICE and takes_all(node, kind))
        or is_neutral(node, kind.dtype)
    ):
        return source
    if node.op in _READ_BY_WRITE and isinstance(node.args[1], Ref):
        part = made_by.get(node.args[1].id)
        if part is not None and part.op == _READ_BY_WRITE[node.op] and part.args == (source, *node.args[2:]):
            return source
    before = made_by.get(source.id)
    if node.op in _SWAPS and before is not None and before.op in _SWAPS:
        rank = len(kind.shape)
        if swapped_dims(node, rank) == swapped_dims(before, rank):
            return before.args[0]
    return None


def simplify(program: Program) -> Program:
    """One forward pass of the rewrites above, then dead code."""
    types = program.types
    same: dict[int, Arg] = {}
    made_by: dict[int, Node] = {}
    seen: dict[tuple[str, bytes, str], Node] = {}
    nodes: list[Node] = []
    for old in program.nodes:
        node = canonical(msgspec.structs.replace(old, args=tuple(map_refs(arg, same) for arg in old.args)), types)
        equal = operand_it_equals(node, types, made_by)
        if equal is not None:
            same[node.outputs[0]] = equal
            continue
        # Encoded, because 0, 0.0 and False are equal in Python. A phase keeps its own copy: sharing across the
        # loss would store what is cheaper to compute again.
        key = (node.op, msgspec.msgpack.encode(node.args), node.phase)
        # What is made from nothing is cheap, and sharing it would tie the layouts of tensors that only look alike: a
        # [batch, seq] and a [seq, seq] of the same sizes.
        if node.op not in DRAWS and node_inputs(node) and key in seen:
            same.update((mine, Ref(first)) for mine, first in zip(node.outputs, seen[key].outputs, strict=True))
            continue
        seen[key] = node
        for value in node.outputs:
            made_by[value] = node
        nodes.append(node)

    def final(value: int) -> int:
        arg = same.get(value)
        return arg.id if isinstance(arg, Ref) else value

    outputs = tuple(msgspec.structs.replace(output, value=final(output.value)) for output in program.outputs)
    return pruned(msgspec.structs.replace(program, nodes=tuple(nodes), outputs=outputs))


def pruned(program: Program) -> Program:
    """Only the nodes that outputs need; results nobody reads become -1."""
    needed = {output.value for output in program.outputs}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node_inputs(node))
            kept.append(msgspec.structs.replace(node, outputs=tuple(v if v in needed else -1 for v in node.outputs)))
    return msgspec.structs.replace(program, nodes=tuple(reversed(kept)))
