"""Generators of calls that create and reduce tensors, or order them along a dim."""

from __future__ import annotations

import torch

from fxpar.rule_examples.draw import Draw, calls
from fxpar.rules.soundness import Example, example


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


@calls("sum", "max", "min", "mean", "prod", "argmax", "argmin", "median")
def reduced_to_one(draw: Draw, op: str) -> Example:
    return example(op, draw.distinct(*draw.shape()))


@calls("nansum")
def sum_without_nans(draw: Draw) -> Example:
    x = draw.real(*draw.sizes(4, 3, 6))
    return example("nansum", torch.where(draw.mask(*x.shape), x, torch.nan), draw.pick([0], [1], [-1], [0, 2], None))


@calls("sum.dim_IntList", "mean.dim", "nansum")
def summed(draw: Draw, op: str) -> Example:
    x = draw.real(*draw.sizes(4, 3, 6))
    dims = draw.pick([0], [-1], [0, 2], [1, 2], None)
    return example(
        op, x if op != "sum.dim_IntList" or draw.chance(0.7) else draw.below(9, *x.shape), dims, draw.chance()
    )


@calls("count_nonzero.dim_IntList")
def counted(draw: Draw) -> Example:
    return example("count_nonzero.dim_IntList", draw.below(3, *draw.sizes(4, 3, 6)), draw.pick([0], [0, 2]))


@calls("amax", "amin")
def extreme(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.sizes(4, 3, 6)), draw.pick([0], [-1], [0, 2], [1, 2], []), draw.chance())


@calls("argmax", "argmin", "max.dim", "min.dim")
def places_of_equals(draw: Draw, op: str) -> Example:
    """Of equal values the first place counts."""
    return example(op, draw.below(3, 4, 6, 3).to(torch.float64), draw.pick(0, 1, -1), draw.chance())


@calls(
    "prod.dim_int",
    "argmax",
    "argmin",
    "max.dim",
    "min.dim",
    "median.dim",
    "nanmedian.dim",
    "mode",
)
def reduced(draw: Draw, op: str) -> Example:
    return example(op, draw.distinct(*draw.sizes(4, 3, 6)), draw.pick(0, 1, -1), draw.chance())


@calls("logsumexp")
def reduced_dims(draw: Draw) -> Example:
    return example("logsumexp", draw.real(*draw.sizes(4, 3, 6)), draw.pick([0], [-1], [0, 2]), draw.chance())


@calls("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def spread(draw: Draw, op: str) -> Example:
    x = draw.real(*draw.sizes(4, 3, 6))
    return example(op, x, draw.pick([0], [-1], [0, 2], None), correction=1, keepdim=draw.chance())


@calls("var.dim", "std.dim")
def spread_dim(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.sizes(4, 3, 6)), draw.pick([0], [-1], [0, 2]), True, draw.chance())


@calls("linalg_vector_norm")
def vector_norm(draw: Draw) -> Example:
    x = draw.real(*draw.sizes(4, 3, 6))
    return example("linalg_vector_norm", x, draw.pick(2, 1, 3.0), draw.pick([0], [0, 2], None))


@calls("norm.ScalarOpt_dim")
def norm_dim(draw: Draw) -> Example:
    return example("norm.ScalarOpt_dim", draw.real(*draw.sizes(4, 3, 6)), 2, draw.pick([0], [0, 2]), draw.chance())


@calls("norm.Scalar")
def norm(draw: Draw) -> Example:
    return example("norm.Scalar", draw.real(*draw.sizes(4, 3)), 2)


@calls("norm.ScalarOpt_dim_dtype")
def norm_dtype(draw: Draw) -> Example:
    return example("norm.ScalarOpt_dim_dtype", draw.real(*draw.sizes(4, 3, 6)), 2, [1], False, dtype=torch.float64)


@calls("kthvalue")
def kth(draw: Draw) -> Example:
    return example("kthvalue", draw.distinct(*draw.sizes(4, 3, 6)), 2, draw.pick(0, 1, -1), draw.chance())


@calls("aminmax")
def both_extremes(draw: Draw) -> Example:
    return example("aminmax", draw.real(*draw.sizes(4, 3, 6)), dim=draw.pick(0, 1, None), keepdim=draw.chance())


@calls("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort")
def ordered(draw: Draw, op: str) -> Example:
    return example(op, draw.distinct(*draw.sizes(*draw.pick((4, 3, 6), (5,), (3, 4)))), draw.pick(0, -1))


@calls("sort.stable", "argsort.stable")
def ordered_stably(draw: Draw, op: str) -> Example:
    return example(op, draw.below(3, *draw.sizes(4, 6)), stable=True, dim=draw.pick(0, -1))


@calls("topk")
def top(draw: Draw) -> Example:
    return example("topk", draw.distinct(*draw.sizes(4, 3, 6)), 2, draw.pick(0, 1, -1))


@calls("_softmax", "_log_softmax")
def softmax(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.sizes(*draw.pick((4, 3, 6), (4, 6)))), draw.pick(0, 1, -1), False)


@calls("_safe_softmax", "softmax.int", "log_softmax.int")
def softmax_dtype(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.sizes(4, 3, 6)), draw.pick(0, 1, -1))


@calls("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(draw: Draw, op: str) -> Example:
    shape = draw.sizes(4, 3, 6)
    return example(op, draw.real(*shape), draw.unit(*shape), draw.pick(0, 1, -1), torch.float64)


@calls("glu")
def glu(draw: Draw) -> Example:
    return example("glu", draw.real(*(2 * n for n in draw.sizes(2, 1, 3))), draw.pick(0, 1, -1))


@calls("glu_backward")
def glu_backward(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    x = draw.real(*(2 * n for n in draw.sizes(2, 1, 3)))
    return example("glu_backward", draw.real(*x.narrow(dim, 0, x.shape[dim] // 2).shape), x, dim)


@calls("renorm")
def renorm(draw: Draw) -> Example:
    return example("renorm", draw.real(*draw.sizes(4, 3, 6)), 2, draw.pick(0, 1, -1), 1.5)


@calls("searchsorted.Tensor")
def searched(draw: Draw) -> Example:
    places, shape = draw.size(1, 6), draw.sizes(4, 3)
    bounds = draw.distinct(*((places,) if draw.chance() else (shape[0], places))).sort().values
    return example("searchsorted.Tensor", bounds, draw.real(*shape))


@calls("bucketize.Tensor")
def bucketed(draw: Draw) -> Example:
    return example("bucketize.Tensor", draw.real(*draw.sizes(4, 3)), draw.distinct(draw.size(1, 6)).sort().values)


@calls("any", "all", "any.dim", "all.dim", "any.dims", "all.dims")
def truth(draw: Draw, op: str) -> Example:
    """Few of the values that decide, so that a rank alone would decide otherwise."""
    shape = draw.sizes(4, 3, 6)
    few = draw.mask(*shape) & draw.mask(*shape) & draw.mask(*shape) & draw.mask(*shape)
    x = few if op.startswith("any") else ~few
    if op.endswith(".dims"):
        return example(op, x, draw.pick([0], [-1], [0, 2]), draw.chance())
    if op.endswith(".dim"):
        return example(op, x, draw.pick(0, 1, -1), draw.chance())
    one = torch.zeros_like(x).view(-1)
    one[draw.below(one.numel(), 1)] = True
    return example(op, one.view(x.shape) if op == "any" else ~one.view(x.shape))
