"""Generators of calls that move, cut, join, create, reduce and index."""

from __future__ import annotations

import torch

from fxpar.rules.soundness import Example, example
from tests.rules.draw import Draw, calls


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
    return example("flatten.using_ints", draw.real(2, 3, 4), *draw.pick((0, 1), (1, 2), (0, -1)))


@calls("unflatten.int")
def unflattened(draw: Draw) -> Example:
    return example("unflatten.int", draw.real(3, 12), 1, draw.pick((3, 4), (2, 6), (2, 2, 3)))


@calls("t", "numpy_T")
def transposed_matrix(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.pick((4, 6), (5,), (1, 3))))


@calls("transpose.int", "swapaxes")
def transposed(draw: Draw, op: str) -> Example:
    return example(op, draw.real(2, 3, 4), *draw.pick((0, 1), (-1, -2), (0, 2), (1, 1)))


@calls("adjoint", "mT")
def matrix_transposed(draw: Draw, op: str) -> Example:
    return example(op, draw.real(2, 3, 4))


@calls("permute")
def permuted(draw: Draw) -> Example:
    return example("permute", draw.real(2, 3, 4, 5), draw.random.sample([0, -3, 2, 3], 4))


@calls("movedim.intlist")
def moved(draw: Draw) -> Example:
    return example("movedim.intlist", draw.real(2, 3, 4, 5), *draw.pick(([0, 1], [2, 0]), ([3], [0]), ([0, 3], [-1, 1])))


@calls("expand", "broadcast_to", "expand_copy")
def expanded(draw: Draw, op: str) -> Example:
    old, new = draw.pick(((4,), (3, 4)), ((1, 4), (3, 4)), ((2, 1, 3), (5, 2, 4, 3)), ((1,), (4,)), ((3, 1), (3, -1)))
    return example(op, draw.real(*old), new if op != "broadcast_to" or -1 not in new else (3, 1))


@calls("repeat")
def repeated(draw: Draw) -> Example:
    return example("repeat", draw.real(*draw.pick((4,), (2,), (6,))), draw.pick((3,), (2, 1), (3, 2), (1, 4)))


@calls("repeat")
def repeated_matrix(draw: Draw) -> Example:
    return example("repeat", draw.real(3, 4), draw.pick((2, 1), (1, 3), (2, 2, 3), (4, 1, 1)))


@calls("flip", "roll")
def turned(draw: Draw, op: str) -> Example:
    x = draw.real(4, 3, 6)
    if op == "flip":
        return example(op, x, draw.pick([0], [-1], [0, 2]))
    return example(op, x, *draw.pick(([1], [0]), ([2, 1], [2, 0]), ([3], [])))


@calls("diagonal")
def diagonal(draw: Draw) -> Example:
    return example("diagonal", draw.real(4, 3, 4), draw.pick(0, 1, -1), *draw.pick((0, 1), (0, 2), (2, 1)))


@calls("diagonal_scatter")
def diagonal_scatter(draw: Draw) -> Example:
    dims = draw.pick((0, 1), (0, 2), (2, 1))
    x = draw.real(4, 3, 4)
    return example("diagonal_scatter", x, draw.real(*torch.diagonal(x, 1, *dims).shape), 1, *dims)


@calls("diagonal_backward")
def diagonal_backward(draw: Draw) -> Example:
    dims = draw.pick((0, 1), (0, 2), (2, 1))
    shape = torch.empty(4, 3, 4).diagonal(1, *dims).shape
    return example("diagonal_backward", draw.real(*shape), [4, 3, 4], 1, *dims)


@calls("view_as_complex")
def to_complex(draw: Draw) -> Example:
    return example("view_as_complex", draw.real(*draw.shape(), 2))


@calls("view_as_real")
def to_real(draw: Draw) -> Example:
    shape = draw.shape()
    return example("view_as_real", torch.complex(draw.real(*shape), draw.real(*shape)))


@calls("unfold")
def unfolded(draw: Draw) -> Example:
    return example("unfold", draw.real(3, 6, 4), 1, 3, draw.pick(1, 2))


@calls("unfold_backward")
def unfolded_backward(draw: Draw) -> Example:
    shape = torch.empty(3, 6, 4).unfold(1, 3, 2).shape
    return example("unfold_backward", draw.real(*shape), [3, 6, 4], 1, 3, 2)


@calls("slice.Tensor")
def sliced(draw: Draw) -> Example:
    bounds = draw.pick((0, 4), (4, 8), (2, 6), (-4, 1000), (None, 6), (0, 3), (1, 8), (0, 8), (4, 4), (8, 9), (-2, None))
    step = draw.pick(1, 1, 1, 2)
    dim = draw.pick(0, 1, -1)
    return example("slice.Tensor", draw.real(*((8, 3) if dim == 0 else (3, 8))), dim, *bounds, step)


@calls("slice_backward")
def sliced_backward(draw: Draw) -> Example:
    low, high = draw.pick((0, 4), (4, 8), (2, 6), (0, 3), (0, 8), (-4, 10**9))
    step = draw.pick(1, 1, 2)
    shape = torch.empty(3, 8)[:, low : min(high, 8) : step].shape
    return example("slice_backward", draw.real(*shape), [3, 8], draw.pick(1, -1), low, high, step)


@calls("slice_scatter")
def sliced_scatter(draw: Draw) -> Example:
    low, high = draw.pick((0, 4), (4, 8), (2, 6), (0, 3), (None, None), (4, 10**9))
    step = draw.pick(1, 1, 2)
    x = draw.real(3, 8)
    return example("slice_scatter", x, draw.real(*x[:, low:high:step].shape), 1, low, high, step)


@calls("select.int")
def selected(draw: Draw) -> Example:
    return example("select.int", draw.real(4, 3, 5), draw.pick(0, 1, -1), draw.pick(0, 2, -1))


@calls("select_backward")
def selected_backward(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    shape = torch.empty(4, 3, 5).select(dim, 0).shape
    return example("select_backward", draw.real(*shape), [4, 3, 5], dim, draw.pick(0, 2, -1))


@calls("select_scatter")
def selected_scatter(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    x = draw.real(4, 3, 5)
    return example("select_scatter", x, draw.real(*x.select(dim, 0).shape), dim, draw.pick(0, 2, -1))


@calls("unbind.int")
def unbound(draw: Draw) -> Example:
    return example("unbind.int", draw.real(4, 3, 5), draw.pick(0, 1, -1))


@calls("split.Tensor", "unsafe_split.Tensor")
def split(draw: Draw, op: str) -> Example:
    return example(op, draw.real(3, 8), draw.pick(4, 2, 3, 8, 6), draw.pick(1, -1))


@calls("split_with_sizes", "split.sizes", "unsafe_split_with_sizes")
def split_sizes(draw: Draw, op: str) -> Example:
    return example(op, draw.real(8, 3), draw.pick([4, 4], [2, 6], [8], [3, 5], [4, 2, 2], [0, 8]), draw.pick(0, -2))


@calls("chunk")
def chunked(draw: Draw) -> Example:
    return example("chunk", draw.real(3, 8), draw.pick(2, 4, 3), 1)


@calls("cat", "concat", "concatenate")
def joined(draw: Draw, op: str) -> Example:
    dim = draw.pick(0, 1, -1)
    sizes = draw.pick((4, 4), (4, 2), (3, 5), (6, 3, 3), (4,), (2, 2, 2), (4, 0, 4))
    parts = [draw.real(*((n, 3) if dim == 0 else (3, n))) for n in sizes]
    if draw.chance(0.2):
        parts.insert(0, draw.real(0))
    return example(op, parts, dim)


@calls("stack")
def stacked(draw: Draw) -> Example:
    return example("stack", [draw.real(3, 4) for _ in range(draw.size(1, 3))], draw.pick(0, 1, 2, -1))


@calls("constant_pad_nd")
def padded(draw: Draw) -> Example:
    pad = draw.pick([1, 2], [0, 0, 1, 0], [0, 1, 0, 0], [-1, 0], [0, 0, 0, 0, 2, 1])
    return example("constant_pad_nd", draw.real(3, 4, 5), pad, draw.pick(0, 0.0, 1.5))


def _pads(op: str) -> int:
    return next(n for n in (1, 2, 3) if f"{n}d" in op)


@calls(*(f"{kind}_pad{n}d{end}" for kind in ("reflection", "replication") for n in (1, 2, 3) for end in ("", "_backward")))
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
    return example(op, draw.real(3, 4, 5), draw.pick(0, 1, -2))


# creation


@calls("full")
def full(draw: Draw) -> Example:
    return example("full", draw.shape(0), 2.5, dtype=torch.float64)


@calls("zeros", "ones")
def constants(draw: Draw, op: str) -> Example:
    return example(op, draw.shape(0), dtype=draw.pick(torch.float64, torch.int64))


@calls("empty.memory_format")
def empty(draw: Draw) -> Example:
    return example("empty.memory_format", draw.shape(0), dtype=torch.float64, values=False)


@calls("empty_permuted")
def empty_permuted(draw: Draw) -> Example:
    return example("empty_permuted", (4, 3), (1, 0), dtype=torch.float64, values=False)


@calls("empty_strided")
def empty_strided(draw: Draw) -> Example:
    return example("empty_strided", (4, 3), (1, 4), dtype=torch.float64, values=False)


@calls("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def new(draw: Draw, op: str) -> Example:
    x = draw.real(*draw.pick((4, 6), (3,), (2, 3, 4)))
    shape = tuple(x.shape) if draw.chance() else draw.shape()
    more = {"new_full": (1.5,), "new_empty_strided": (torch.empty(shape).stride(),)}.get(op, ())
    return example(op, x, shape, *more, values="empty" not in op)


@calls("zeros_like", "ones_like", "full_like", "empty_like")
def like(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.shape()), *((0.5,) if op == "full_like" else ()), values=op != "empty_like")


@calls("fxpar::uniform", "fxpar::normal")
def drawn(draw: Draw, op: str) -> Example:
    shape = draw.shape()
    whole = [n for size in shape for n in (size, 0, size)]
    return example(op, draw.real(*shape), torch.tensor(draw.size(0, 99)), 3, whole)


@calls("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "scalar_tensor", "tril_indices",
       "triu_indices")  # fmt: skip
def positions(draw: Draw, op: str) -> Example:
    args = {
        "arange": (5,), "arange.start": (2, 7), "arange.start_step": (1, 9, 2), "linspace": (0, 1, 5), "eye": (4,),
        "eye.m": (3, 4), "scalar_tensor": (2.5,), "tril_indices": (3, 4, 0), "triu_indices": (3, 4, 0),
    }[op]  # fmt: skip
    return example(op, *args)


# reductions


@calls("sum", "max", "min", "mean", "prod", "any", "all", "argmax", "argmin", "median")
def reduced_to_one(draw: Draw, op: str) -> Example:
    return example(op, draw.distinct(*draw.shape()))


@calls("sum.dim_IntList", "mean.dim", "nansum")
def summed(draw: Draw, op: str) -> Example:
    x = draw.real(4, 3, 6)
    dims = draw.pick([0], [-1], [0, 2], [1, 2], None)
    return example(op, x if op != "sum.dim_IntList" or draw.chance(0.7) else draw.below(9, 4, 3, 6), dims, draw.chance())


@calls("count_nonzero.dim_IntList")
def counted(draw: Draw) -> Example:
    return example("count_nonzero.dim_IntList", draw.below(3, 4, 3, 6), draw.pick([0], [0, 2]))


@calls("amax", "amin")
def extreme(draw: Draw, op: str) -> Example:
    return example(op, draw.real(4, 3, 6), draw.pick([0], [-1], [0, 2], [1, 2], []), draw.chance())


@calls("prod.dim_int", "any.dim", "all.dim", "argmax", "argmin", "max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode")
def reduced(draw: Draw, op: str) -> Example:
    return example(op, draw.distinct(4, 3, 6), draw.pick(0, 1, -1), draw.chance())


@calls("any.dims", "all.dims", "logsumexp")
def reduced_dims(draw: Draw, op: str) -> Example:
    return example(op, draw.real(4, 3, 6), draw.pick([0], [-1], [0, 2]), draw.chance())


@calls("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def spread(draw: Draw, op: str) -> Example:
    return example(op, draw.real(4, 3, 6), draw.pick([0], [-1], [0, 2], None), correction=1, keepdim=draw.chance())


@calls("var.dim", "std.dim")
def spread_dim(draw: Draw, op: str) -> Example:
    return example(op, draw.real(4, 3, 6), draw.pick([0], [-1], [0, 2]), True, draw.chance())


@calls("linalg_vector_norm")
def vector_norm(draw: Draw) -> Example:
    return example("linalg_vector_norm", draw.real(4, 3, 6), draw.pick(2, 1, 3.0), draw.pick([0], [0, 2], None))


@calls("norm.ScalarOpt_dim")
def norm_dim(draw: Draw) -> Example:
    return example("norm.ScalarOpt_dim", draw.real(4, 3, 6), 2, draw.pick([0], [0, 2]), draw.chance())


@calls("norm.Scalar")
def norm(draw: Draw) -> Example:
    return example("norm.Scalar", draw.real(4, 3), 2)


@calls("norm.ScalarOpt_dim_dtype")
def norm_dtype(draw: Draw) -> Example:
    return example("norm.ScalarOpt_dim_dtype", draw.real(4, 3, 6), 2, [1], False, dtype=torch.float64)


@calls("kthvalue")
def kth(draw: Draw) -> Example:
    return example("kthvalue", draw.distinct(4, 3, 6), 2, draw.pick(0, 1, -1), draw.chance())


@calls("aminmax")
def both_extremes(draw: Draw) -> Example:
    return example("aminmax", draw.real(4, 3, 6), dim=draw.pick(0, 1, None), keepdim=draw.chance())


@calls("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort")
def ordered(draw: Draw, op: str) -> Example:
    return example(op, draw.distinct(*draw.pick((4, 3, 6), (5,), (3, 4))), draw.pick(0, -1))


@calls("sort.stable", "argsort.stable")
def ordered_stably(draw: Draw, op: str) -> Example:
    return example(op, draw.below(3, 4, 6), stable=True, dim=draw.pick(0, -1))


@calls("topk")
def top(draw: Draw) -> Example:
    return example("topk", draw.distinct(4, 3, 6), 2, draw.pick(0, 1, -1))


@calls("_softmax", "_log_softmax")
def softmax(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.pick((4, 3, 6), (4, 6))), draw.pick(0, 1, -1), False)


@calls("_safe_softmax", "softmax.int", "log_softmax.int")
def softmax_dtype(draw: Draw, op: str) -> Example:
    return example(op, draw.real(4, 3, 6), draw.pick(0, 1, -1))


@calls("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(draw: Draw, op: str) -> Example:
    return example(op, draw.real(4, 3, 6), draw.unit(4, 3, 6), draw.pick(0, 1, -1), torch.float64)


@calls("glu")
def glu(draw: Draw) -> Example:
    return example("glu", draw.real(4, 2, 6), draw.pick(0, 1, -1))


@calls("glu_backward")
def glu_backward(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    x = draw.real(4, 2, 6)
    return example("glu_backward", draw.real(*x.narrow(dim, 0, x.shape[dim] // 2).shape), x, dim)


@calls("renorm")
def renorm(draw: Draw) -> Example:
    return example("renorm", draw.real(4, 3, 6), 2, draw.pick(0, 1, -1), 1.5)


@calls("searchsorted.Tensor")
def searched(draw: Draw) -> Example:
    if draw.chance():
        return example("searchsorted.Tensor", draw.distinct(5).sort().values, draw.real(4, 3))
    return example("searchsorted.Tensor", draw.distinct(4, 5).sort().values, draw.real(4, 3))


@calls("bucketize.Tensor")
def bucketed(draw: Draw) -> Example:
    return example("bucketize.Tensor", draw.real(4, 3), draw.distinct(5).sort().values)


# indexing


@calls("gather")
def gathered(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    x = draw.real(4, 3, 6)
    shape = [4, 3, draw.pick(6, 2)] if dim != -1 else [draw.pick(4, 2), 3, 6]
    shape[dim] = draw.size(1, 5)
    index = draw.below(x.shape[dim], *shape)
    return example("gather", x, dim, index)


@calls("scatter.src", "scatter.value", "scatter_add", "scatter.reduce", "scatter_reduce.two")
def scattered(draw: Draw, op: str) -> Example:
    dim = draw.pick(0, 1, -1)
    x = draw.real(4, 3, 6)
    shape = [draw.pick(4, 2) if dim != 0 else 4, 3, 6]
    shape[dim] = draw.size(1, x.shape[dim])
    if op == "scatter_add":
        index = draw.below(x.shape[dim], *shape)
    else:
        index = draw.unique_rows(x.shape[dim], *shape, dim=dim % 3)
    source = draw.real(*(s + draw.pick(0, 0, 1) if d != dim % 3 else s for d, s in enumerate(shape)))
    if op == "scatter.value":
        return example(op, x, dim, index, draw.pick(0, 0.0, 1.5))
    if op == "scatter.reduce":
        return example(op, x, dim, index, source, reduce=draw.pick("add", "multiply"))
    if op == "scatter_reduce.two":
        return example(op, x, dim, index, source, draw.pick("sum", "amax", "mean"), include_self=draw.chance())
    return example(op, x, dim, index, source)


@calls("index.Tensor", "_unsafe_index.Tensor")
def indexed(draw: Draw, op: str) -> Example:
    x = draw.real(5, 4, 3)
    i, j = draw.below(5, *draw.pick((6,), (2, 3), (2, 1))), draw.below(4, *draw.pick((3,), (1,), (6, 3)))
    k = draw.below(3, 2, 3)
    options = ([i], [None, j], [draw.below(5, 2, 1), None, k], [None, draw.below(4, 3), k], [draw.below(5, 6), draw.below(4, 6)])
    return example(op, x, draw.pick(*options))


@calls("index_put", "_unsafe_index_put", "_index_put_impl")
def put(draw: Draw, op: str) -> Example:
    x = draw.real(5, 4, 3)
    adds = draw.chance(0.7)
    kind = draw.pick("row", "columns", "apart", "pair")
    if kind == "row":
        rows = draw.below(5, 2, 3) if adds else draw.unique_rows(5, 4, dim=0)
        indices, shape = [rows], (*rows.shape, 4, 3)
    elif kind == "columns":
        columns = draw.below(4, 6) if adds else draw.unique_rows(4, 3, dim=0)
        indices, shape = [None, columns], (5, *columns.shape, 3)
    elif kind == "apart":
        rows = draw.below(5, 6) if adds else draw.unique_rows(5, 4, dim=0)
        indices, shape = [rows, None, draw.below(3, *rows.shape)], (*rows.shape, 4)
    else:
        rows = draw.below(5, 6, 1) if adds else draw.unique_rows(5, 4, 1, dim=0)
        columns = draw.below(4, 3) if adds else draw.unique_rows(4, 3, dim=0)
        indices, shape = [rows, columns], (rows.shape[0], 3, 3)
    return example(op, x, indices, draw.real(*(shape if draw.chance(0.7) else shape[1:])), adds)


@calls("index_select")
def index_selected(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    return example("index_select", draw.real(4, 3, 6), dim, draw.below((4, 3, 6)[dim], 5))


@calls("index_add", "index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor")
def index_written(draw: Draw, op: str) -> Example:
    dim = draw.pick(0, 1, -1)
    shape = [4, 3, 6]
    index = draw.below(shape[dim], 5) if op == "index_add" else draw.unique_rows(shape[dim], 2, dim=0)
    if "fill" in op:
        return example(op, draw.real(*shape), dim, index, draw.pick(0, 1.5) if "Scalar" in op else draw.real())
    source = list(shape)
    source[dim] = len(index)
    return example(op, draw.real(*shape), dim, index, draw.real(*source))
