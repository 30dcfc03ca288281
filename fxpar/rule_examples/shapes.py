"""Generators of calls that move, cut and join."""

from __future__ import annotations

import torch

from fxpar.rule_examples.draw import Draw, calls
from fxpar.rules.soundness import Example, example


@calls("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")
def viewed(draw: Draw, op: str) -> Example:
    old, new = draw.pick(
        ((4, 6), (2, 2, 6)), ((2, 3, 4), (6, 4)), ((6, 4), (3, 8)), ((2, 6), (12,)), ((3, 4, 2), (3, 2, 2, 2)),
        ((20, 9), (30, 6)), ((4, 1, 6), (4, 6)), ((8,), (2, 1, 4)), ((2, 2, 6), (2, 12)), ((5, 4), (20,)), ((), (1, 1)),
        ((6, 8), (2, 3, 2, 4)), ((12,), (2, 3, 2)), ((3, 5), (5, 3)),
    )  # fmt: skip
    if op == "_reshape_alias":
        strides = torch.empty(new).stride()
        return example(op, draw.real(*old), new, strides)
    return example(op, draw.real(*old), new)


@calls("fxpar::as_strided")
def strided(draw: Draw) -> Example:
    size, stride = draw.pick(
        ((4, 6), (6, 1)), ((4, 1, 6), (6, 99, 1)), ((24,), (1,)), ((2, 3), (6, 2)), ((6, 4), (1, 6))
    )
    return example("fxpar::as_strided", draw.real(4, 6), size, stride, 0)


@calls("fxpar::as_strided_scatter")
def strided_scatter(draw: Draw) -> Example:
    size, stride = draw.pick(((4, 6), (6, 1)), ((4, 6, 1), (6, 1, 1)), ((2, 3), (6, 2)))
    return example("fxpar::as_strided_scatter", draw.real(*draw.pick((24,), (4, 6))), draw.real(*size), size, stride, 0)


@calls("fxpar::microbatch")
def microbatch(draw: Draw) -> Example:
    dim = draw.random.randint(0, 2)
    shape = [draw.pick(2, 3, 4) for _ in range(3)]
    count = draw.pick(1, 2, 3)
    shape[dim] *= count
    return example("fxpar::microbatch", draw.real(*shape), torch.tensor(draw.random.randint(0, count - 1)), dim, count)


@calls("unsqueeze", "unsqueeze_copy")
def unsqueezed(draw: Draw, op: str) -> Example:
    shape = draw.shape()
    return example(op, draw.real(*shape), draw.random.randint(-len(shape) - 1, len(shape)))


@calls("squeeze", "squeeze_copy")
def squeezed(draw: Draw, op: str) -> Example:
    return example(op, draw.real(1, *draw.shape(), 1))


@calls("squeeze.dim")
def squeezed_dim(draw: Draw) -> Example:
    shape = draw.shape(2, 3)
    return example("squeeze.dim", draw.real(*shape), draw.random.randint(-len(shape), len(shape) - 1))


@calls("squeeze.dims")
def squeezed_dims(draw: Draw) -> Example:
    return example("squeeze.dims", draw.real(2, 1, 3, 1), draw.pick([1], [1, 3], [0, 1]))


@calls("flatten.using_ints")
def flattened(draw: Draw) -> Example:
    return example("flatten.using_ints", draw.real(*draw.sizes(2, 3, 4)), *draw.pick((0, 1), (1, 2), (0, -1)))


@calls("unflatten.int")
def unflattened(draw: Draw) -> Example:
    return example("unflatten.int", draw.real(3, 12), 1, draw.pick((3, 4), (2, 6), (2, 2, 3)))


@calls("t", "numpy_T")
def transposed_matrix(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.pick((4, 6), (5,), (1, 3))))


@calls("transpose.int", "swapaxes")
def transposed(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.sizes(2, 3, 4)), *draw.pick((0, 1), (-1, -2), (0, 2), (1, 1)))


@calls("adjoint", "mT")
def matrix_transposed(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.sizes(2, 3, 4)))


@calls("permute")
def permuted(draw: Draw) -> Example:
    return example("permute", draw.real(*draw.sizes(2, 3, 4, 5)), draw.random.sample([0, -3, 2, 3], 4))


@calls("movedim.intlist")
def moved(draw: Draw) -> Example:
    x = draw.real(*draw.sizes(2, 3, 4, 5))
    return example("movedim.intlist", x, *draw.pick(([0, 1], [2, 0]), ([3], [0]), ([0, 3], [-1, 1])))


@calls("expand", "broadcast_to", "expand_copy")
def expanded(draw: Draw, op: str) -> Example:
    old, new = draw.pick(((4,), (3, 4)), ((1, 4), (3, 4)), ((2, 1, 3), (5, 2, 4, 3)), ((1,), (4,)), ((3, 1), (3, -1)))
    return example(op, draw.real(*old), new if op != "broadcast_to" or -1 not in new else (3, 1))


@calls("repeat")
def repeated(draw: Draw) -> Example:
    return example("repeat", draw.real(*draw.pick((4,), (2,), (6,))), draw.pick((3,), (2, 1), (3, 2), (1, 4)))


@calls("repeat")
def repeated_matrix(draw: Draw) -> Example:
    return example("repeat", draw.real(*draw.sizes(3, 4)), draw.pick((2, 1), (1, 3), (2, 2, 3), (4, 1, 1)))


@calls("flip", "roll")
def turned(draw: Draw, op: str) -> Example:
    x = draw.real(*draw.sizes(4, 3, 6))
    if op == "flip":
        return example(op, x, draw.pick([0], [-1], [0, 2]))
    return example(op, x, *draw.pick(([1], [0]), ([2, 1], [2, 0]), ([3], [])))


@calls("diagonal")
def diagonal(draw: Draw) -> Example:
    return example("diagonal", draw.real(*draw.sizes(4, 3, 4)), draw.pick(0, 1, -1), *draw.pick((0, 1), (0, 2), (2, 1)))


@calls("diagonal_scatter")
def diagonal_scatter(draw: Draw) -> Example:
    dims = draw.pick((0, 1), (0, 2), (2, 1))
    x = draw.real(*draw.sizes(4, 3, 4))
    return example("diagonal_scatter", x, draw.real(*torch.diagonal(x, 1, *dims).shape), 1, *dims)


@calls("diagonal_backward")
def diagonal_backward(draw: Draw) -> Example:
    dims = draw.pick((0, 1), (0, 2), (2, 1))
    sizes = draw.sizes(4, 3, 4)
    shape = torch.empty(sizes).diagonal(1, *dims).shape
    return example("diagonal_backward", draw.real(*shape), list(sizes), 1, *dims)


@calls("view_as_complex")
def to_complex(draw: Draw) -> Example:
    return example("view_as_complex", draw.real(*draw.shape(), 2))


@calls("view_as_real")
def to_real(draw: Draw) -> Example:
    shape = draw.shape()
    return example("view_as_real", torch.complex(draw.real(*shape), draw.real(*shape)))


@calls("unfold")
def unfolded(draw: Draw) -> Example:
    x = draw.real(*draw.sizes(3), draw.random.randint(3, 7), *draw.sizes(4))
    return example("unfold", x, 1, 3, draw.pick(1, 2))


@calls("unfold_backward")
def unfolded_backward(draw: Draw) -> Example:
    sizes = (*draw.sizes(3), draw.random.randint(3, 7), *draw.sizes(4))
    shape = torch.empty(sizes).unfold(1, 3, 2).shape
    return example("unfold_backward", draw.real(*shape), list(sizes), 1, 3, 2)


@calls("slice.Tensor")
def sliced(draw: Draw) -> Example:
    bounds = draw.pick(
        (0, 4), (4, 8), (2, 6), (-4, 1000), (None, 6), (0, 3), (1, 8), (0, 8), (4, 4), (8, 9), (-2, None)
    )
    step = draw.pick(1, 1, 1, 2)
    dim, other = draw.pick(0, 1, -1), draw.rarely(draw.pick(3, 4, 6))
    return example("slice.Tensor", draw.real(*((8, other) if dim == 0 else (other, 8))), dim, *bounds, step)


@calls("slice_backward")
def sliced_backward(draw: Draw) -> Example:
    low, high = draw.pick((0, 4), (4, 8), (2, 6), (0, 3), (0, 8), (-4, 10**9))
    step = draw.pick(1, 1, 2)
    other = draw.rarely(draw.pick(3, 4, 6))
    shape = torch.empty(other, 8)[:, low : min(high, 8) : step].shape
    return example("slice_backward", draw.real(*shape), [other, 8], draw.pick(1, -1), low, high, step)


@calls("slice_scatter")
def sliced_scatter(draw: Draw) -> Example:
    low, high = draw.pick((0, 4), (4, 8), (2, 6), (0, 3), (None, None), (4, 10**9))
    step = draw.pick(1, 1, 2)
    x = draw.real(draw.rarely(draw.pick(3, 4, 6)), 8)
    return example("slice_scatter", x, draw.real(*x[:, low:high:step].shape), 1, low, high, step)


@calls("select.int")
def selected(draw: Draw) -> Example:
    return example("select.int", draw.real(*draw.sizes(4, 3, 5)), draw.pick(0, 1, -1), draw.pick(0, 1, -1))


@calls("select_backward")
def selected_backward(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    sizes = draw.sizes(4, 3, 5)
    shape = torch.empty(sizes).select(dim, 0).shape
    return example("select_backward", draw.real(*shape), list(sizes), dim, draw.pick(0, 1, -1))


@calls("select_scatter")
def selected_scatter(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    x = draw.real(*draw.sizes(4, 3, 5))
    return example("select_scatter", x, draw.real(*x.select(dim, 0).shape), dim, draw.pick(0, 1, -1))


@calls("unbind.int")
def unbound(draw: Draw) -> Example:
    return example("unbind.int", draw.real(*draw.sizes(4, 3, 5)), draw.pick(0, 1, -1))


@calls("split.Tensor", "unsafe_split.Tensor")
def split(draw: Draw, op: str) -> Example:
    return example(op, draw.real(draw.rarely(draw.pick(3, 4)), 8), draw.pick(4, 2, 3, 8, 6), draw.pick(1, -1))


@calls("split_with_sizes", "split.sizes", "unsafe_split_with_sizes")
def split_sizes(draw: Draw, op: str) -> Example:
    x = draw.real(8, draw.rarely(3))
    return example(op, x, draw.pick([4, 4], [2, 6], [8], [3, 5], [4, 2, 2], [0, 8]), draw.pick(0, -2))


@calls("chunk")
def chunked(draw: Draw) -> Example:
    return example("chunk", draw.real(3, 8), draw.pick(2, 4, 3), 1)


@calls("cat", "concat", "concatenate")
def joined(draw: Draw, op: str) -> Example:
    dim = draw.pick(0, 1, -1)
    sizes = draw.pick((4, 4), (4, 2), (2, 6), (6, 3, 3), (4,), (2, 2, 4), (4, 0, 4), (3, 5))
    other = draw.rarely(draw.pick(3, 4, 6))
    parts = [draw.real(*((n, other) if dim == 0 else (other, n))) for n in sizes]
    if draw.chance(0.2):
        parts.insert(0, draw.real(0))
    return example(op, parts, dim)


@calls("stack")
def stacked(draw: Draw) -> Example:
    shape = draw.sizes(3, 4)
    return example("stack", [draw.real(*shape) for _ in range(draw.random.randint(1, 3))], draw.pick(0, 1, 2, -1))


@calls("constant_pad_nd")
def padded(draw: Draw) -> Example:
    pad = draw.pick([1, 2], [0, 0, 1, 0], [0, 1, 0, 0], [-1, 0], [0, 0, 0, 0, 2, 1])
    return example("constant_pad_nd", draw.real(*draw.sizes(3, 4, 5)), pad, draw.pick(0, 0.0, 1.5))


def _pads(op: str) -> int:
    return next(n for n in (1, 2, 3) if f"{n}d" in op)


@calls(
    *(f"{kind}_pad{n}d{end}" for kind in ("reflection", "replication") for n in (1, 2, 3) for end in ("", "_backward"))
)
def padded_border(draw: Draw, op: str) -> Example:
    n = _pads(op)
    pad = [1, 2, 2, 1, 1, 1][: 2 * n]
    x = draw.real(*((4, 3, *(4,) * n) if draw.chance(0.7) else (3, *(4,) * n)))
    if "backward" not in op:
        return example(op, x, pad)
    shape = [*x.shape[:-n], *(s + pad[2 * (n - 1 - i)] + pad[2 * (n - 1 - i) + 1] for i, s in enumerate(x.shape[-n:]))]
    return example(op, draw.real(*shape), x, pad)


@calls("tril", "triu")
def triangle(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.sizes(3, 4, 5)), draw.pick(0, 1, -2))
