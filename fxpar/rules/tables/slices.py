"""Cutting a dim into pieces and joining pieces.

A dim of ``n`` of which ``[start, start + m)`` is taken is cut as ``(K! g)`` with ``g = gcd(n, start, m)``: the ``g``
inner elements are a loop when whole rows of them move. A rank with ``g'`` of the ``g`` takes
``[start / g * g', ...)`` of its local dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpar.plans.program import Arg, Ref
from fxpar.rules.factor_rule import Block, Call, Factors, Group, Linear, Slot
from fxpar.rules.groups import Region, loop, passes
from fxpar.rules.registry import rule


def slice_bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """``start`` and ``end`` as torch clamps them: ``0 <= start <= end <= size``."""

    def clamp(value: int) -> int:
        return min(max(value + size if value < 0 else value, 0), size)

    low = clamp(start or 0)
    return low, max(low, clamp(size if end is None else end))


def other_dims(
    call: Call, dim: int, inputs: Sequence[int], outputs: Sequence[int], *, dropped: Sequence[int] = ()
) -> tuple[Group, ...]:
    """Loops of every dim but ``dim`` of operand ``inputs[0]``; operands in ``dropped`` (of inputs) lack ``dim``."""
    return _aligned(call, call.shape(inputs[0]), dim, inputs, outputs, dropped, ())


def _aligned(
    call: Call,
    shape: tuple[int, ...],
    dim: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    short_inputs: Sequence[int],
    short_outputs: Sequence[int],
) -> tuple[Group, ...]:
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(shape):
        if d != dim:
            groups += loop(
                call,
                size,
                {i: d - (i in short_inputs and d > dim) for i in inputs},
                {o: d - (o in short_outputs and d > dim) for o in outputs},
            )
    return groups


def blocks(
    call: Call, sizes_in: dict[int, int], sizes_out: dict[int, int], dim: int, offsets: Sequence[int] = ()
) -> tuple[Group, ...]:
    """The loop over the common inner block of a dim of these sizes, cut at ``offsets``; empty pieces carry nothing."""
    sizes_in = {i: size for i, size in sizes_in.items() if size}
    sizes_out = {o: size for o, size in sizes_out.items() if size}
    g = math.gcd(*sizes_in.values(), *sizes_out.values(), *offsets)
    if g <= 1:
        return ()
    inputs: dict[int, Region] = {i: Slot((dim,), size // g, 1) for i, size in sizes_in.items()}
    outputs: dict[int, Region] = {o: Slot((dim,), size // g, 1) for o, size in sizes_out.items()}
    soft = any(size != g for size in (*sizes_in.values(), *sizes_out.values()))
    return loop(call, g, inputs, outputs, soft=soft)


def scaled(value: int, local: int, size: int) -> int:
    """A position in a dim of ``size`` as a position in its local part of ``local`` elements."""
    return value * local // size if size else 0


def slice_tensor(call: Call) -> Factors:
    dim = call.arg("dim") % len(call.shape(0))
    size = call.shape(0)[dim]
    low, high = slice_bounds(call.arg("start"), call.arg("end"), size)
    groups = other_dims(call, dim, (0,), (0,))
    if call.arg("step") == 1:
        groups += blocks(call, {0: size}, {0: high - low}, dim, (low,))
    return Factors(groups, passes(call, "0"))


def local_slice(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    dim = call.arg("dim") % len(call.shape(0))
    size, local = call.shape(0)[dim], block.input_shape(0)[dim]
    low, high = slice_bounds(call.arg("start"), call.arg("end"), size)
    return call.op, call.with_args(start=scaled(low, local, size), end=scaled(high, local, size))


rule("slice.Tensor", slice_tensor, localise=local_slice)


def slice_backward(call: Call) -> Factors:
    dim = call.arg("dim") % len(call.out_shape())
    size = call.out_shape()[dim]
    low, high = slice_bounds(call.arg("start"), call.arg("end"), size)
    groups = other_dims(call, dim, (0,), (0,))
    if call.arg("step") == 1:
        groups += blocks(call, {0: high - low}, {0: size}, dim, (low,))
    return Factors(groups, passes(call, "0"))


def local_slice_backward(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    dim = call.arg("dim") % len(call.out_shape())
    size, local = call.out_shape()[dim], block.output_shape()[dim]
    low, high = slice_bounds(call.arg("start"), call.arg("end"), size)
    return call.op, call.with_args(
        input_sizes=block.output_shape(), start=scaled(low, local, size), end=scaled(high, local, size)
    )


rule("slice_backward", slice_backward, localise=local_slice_backward)


def slice_scatter(call: Call) -> Factors:
    dim = call.arg("dim") % len(call.shape(0))
    size = call.shape(0)[dim]
    low, high = slice_bounds(call.arg("start"), call.arg("end"), size)
    groups = other_dims(call, dim, (0, 1), (0,))
    if call.arg("step") == 1:
        groups += blocks(call, {0: size, 1: high - low}, {0: size}, dim, (low,))
    return Factors(groups, passes(call, "01"))


rule("slice_scatter", slice_scatter, localise=local_slice)


def select(call: Call) -> Factors:
    dim = call.arg("dim") % len(call.shape(0))
    return Factors(_aligned(call, call.shape(0), dim, (0,), (0,), (), (0,)), passes(call, "0"))


rule("select.int", select)


def select_backward(call: Call) -> Factors:
    dim = call.arg("dim") % len(call.out_shape())
    return Factors(_aligned(call, call.out_shape(), dim, (0,), (0,), (0,), ()), passes(call, "0"))


rule(
    "select_backward",
    select_backward,
    localise=lambda call, block: (call.op, call.with_args(input_sizes=block.output_shape())),
)


def select_scatter(call: Call) -> Factors:
    dim = call.arg("dim") % len(call.shape(0))
    return Factors(_aligned(call, call.shape(0), dim, (0, 1), (0,), (1,), ()), passes(call, "01"))


rule("select_scatter", select_scatter)


def unbind(call: Call) -> Factors:
    dim = call.arg("dim") % len(call.shape(0))
    outputs = _present(call)
    return Factors(_aligned(call, call.shape(0), dim, (0,), outputs, (), outputs), passes(call, "0"))


def _present(call: Call) -> tuple[int, ...]:
    return tuple(o for o, out in enumerate(call.outputs) if out is not None)


rule("unbind.int", unbind)


def piece_sizes(call: Call, dim: int) -> tuple[int, ...]:
    """Lengths of the pieces of a split call (an unused piece has no output, so they come from the arguments)."""
    size = call.shape(0)[dim]
    if call.has("split_sizes"):
        return tuple(call.arg("split_sizes"))
    if call.has("split_size"):
        step = call.arg("split_size")
    else:
        step = -(-size // call.arg("chunks"))
    if isinstance(step, tuple):
        return step
    count = max(-(-size // step), 1) if step else 1
    return tuple(min(step, size - i * step) for i in range(count))


def split(call: Call) -> Factors:
    dim = call.arg("dim") % len(call.shape(0))
    outputs = _present(call)
    pieces = piece_sizes(call, dim)
    groups = other_dims(call, dim, (0,), outputs)
    groups += blocks(call, {0: call.shape(0)[dim]}, {o: pieces[o] for o in outputs}, dim, pieces)
    return Factors(groups, passes(call, "0"))


def local_split(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    dim = call.arg("dim") % len(call.shape(0))
    size, local = call.shape(0)[dim], block.input_shape(0)[dim]
    sizes = tuple(scaled(piece, local, size) for piece in piece_sizes(call, dim))
    return "aten.split_with_sizes.default", (call.args[0], sizes, dim)


rule(
    ["split.Tensor", "split_with_sizes", "split.sizes", "chunk", "unsafe_split.Tensor", "unsafe_split_with_sizes"],
    split,
    localise=local_split,
)


def list_operands(call: Call, name: str) -> tuple[int, ...]:
    """Operand numbers of a list-of-tensors argument."""
    return tuple(item.id for item in call.arg(name) if isinstance(item, Ref))


def cat(call: Call) -> Factors:
    """Pieces along the joined dim; an old-style empty operand of shape (0,) counts for nothing."""
    operands = list_operands(call, "tensors")
    rank = len(call.out_shape())
    dim = call.arg("dim") % rank
    real = tuple(o for o in operands if len(call.shape(o)) == rank and (rank > 1 or call.shape(o) != (0,)))
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.out_shape()):
        if d != dim:
            groups += loop(call, size, {o: d for o in real}, {0: d})
    groups += blocks(call, {o: call.shape(o)[dim] for o in real}, {0: call.out_shape()[dim]}, dim)
    return Factors(groups, (Linear(operands, (0,)),))


rule(["cat", "concat", "concatenate"], cat)


def stack(call: Call) -> Factors:
    operands = list_operands(call, "tensors")
    dim = call.arg("dim") % len(call.out_shape())
    groups = _aligned(call, call.out_shape(), dim, operands, (0,), operands, ())
    return Factors(groups, (Linear(operands, (0,)),))


rule("stack", stack)


def constant_pad(call: Call) -> Factors:
    """Padded dims stay whole; linear only when padding with 0."""
    pad: tuple[int, ...] = call.arg("pad")
    rank = len(call.shape(0))
    padded = {rank - 1 - i // 2 for i, width in enumerate(pad) if width != 0}
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)):
        groups += loop(call, size if d not in padded else 1, {0: d}, {0: d})
    return Factors(groups, passes(call, "0") if call.arg("value") == 0 else ())


rule("constant_pad_nd", constant_pad)


def border_pad(call: Call) -> Factors:
    """Reflection and replication: the last dims that the pad names stay whole."""
    rank, count = len(call.shape(0)), len(call.arg("padding")) // 2
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)[: rank - count]):
        groups += loop(call, size, {i: d for i in range(len(call.inputs))}, {0: d}, nonempty=True)
    return Factors(groups, passes(call, "0"))


rule(
    [f"{kind}_pad{n}d{end}" for kind in ("reflection", "replication") for n in (1, 2, 3) for end in ("", "_backward")],
    border_pad,
)
