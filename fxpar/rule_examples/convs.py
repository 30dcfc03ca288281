"""Generators of convolutions, pooling and resampling."""

from __future__ import annotations

import torch

from fxpar.rule_examples.draw import Draw, calls
from fxpar.rules.run_op import run_op
from fxpar.rules.soundness import Example, example


def convolution_call(draw: Draw, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, tuple]:
    dims = draw.pick(1, 2, 2, 3)
    per_in, per_out = (draw.size(1, 5), draw.size(1, 5)) if groups == 1 else (draw.pick(1, 2), draw.pick(1, 2))
    # of no channels torch makes outputs and gradients of shapes that do not agree
    per_in, per_out = max(per_in, 1), max(per_out, 1)
    flipped = draw.chance(0.3)
    kernel, stride, padding = draw.pick((3, 1, 1), (2, 2, 0), (1, 1, 0), (3, 2, 1), (2, 1, 0), (2, 2, 0))
    x = draw.real(draw.size(1, 4), groups * per_in, *(4 for _ in range(dims)))
    channels = (groups * per_in, per_out) if flipped else (groups * per_out, per_in)
    w = draw.real(*channels, *(kernel for _ in range(dims)))
    bias = draw.real(groups * per_out) if draw.chance() else None
    extra = [1] * dims if flipped and stride == 2 else [0] * dims
    return x, w, bias, ([stride] * dims, [padding] * dims, [1] * dims, flipped, extra, groups)


def backward_call(draw: Draw, groups: int) -> Example:
    x, w, bias, rest = convolution_call(draw, groups)
    y = torch.ops.aten.convolution(x, w, bias, *rest)
    sizes = [y.shape[1]] if bias is not None else [0]
    masks = [draw.chance(0.8), True, bias is not None]
    return example("convolution_backward", draw.real(*y.shape), x, w, sizes, *rest, masks)


@calls("convolution")
def convolution(draw: Draw) -> Example:
    x, w, bias, rest = convolution_call(draw, 1)
    return example("convolution", x, w, bias, *rest)


@calls("convolution")
def grouped_convolution(draw: Draw) -> Example:
    x, w, bias, rest = convolution_call(draw, draw.pick(2, 3, 4))
    return example("convolution", x, w, bias, *rest)


@calls("convolution_backward")
def convolution_backward(draw: Draw) -> Example:
    return backward_call(draw, 1)


@calls("convolution_backward")
def grouped_convolution_backward(draw: Draw) -> Example:
    return backward_call(draw, draw.pick(2, 3, 4))


def window(draw: Draw) -> tuple[int, int, int, int]:
    """Kernel, stride, padding, dilation."""
    return draw.pick((3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 0, 1), (1, 2, 0, 1), (2, 1, 0, 1), (3, 1, 2, 2), (5, 2, 2, 1),
                     (2, 2, 0, 1), (7, 2, 3, 1), (4, 3, 1, 1))  # fmt: skip


@calls("convolution", "convolution_backward")
def image_rows(draw: Draw, op: str) -> Example:
    """Images with room for several ranks; both ends of the window may be uneven."""
    dims = draw.pick(1, 2, 2)
    groups = draw.pick(1, 1, 2)
    kernel, stride, padding, dilation = window(draw)
    x = draw.real(draw.size(1, 2), groups * max(draw.size(1, 2), 1), *(draw.size(7, 12) for _ in range(dims)))
    w = draw.real(groups * max(draw.size(1, 2), 1), x.shape[1] // groups, *(kernel for _ in range(dims)))
    bias = draw.real(w.shape[0]) if draw.chance() else None
    rest = ([stride] * dims, [padding] * dims, [dilation] * dims, False, [0] * dims, groups)
    if op == "convolution":
        return example(op, x, w, bias, *rest)
    y = torch.ops.aten.convolution(x, w, bias, *rest)
    masks = [draw.chance(0.8), draw.chance(0.8), bias is not None]
    return example(op, draw.real(*y.shape), x, w, [w.shape[0]] if bias is not None else [0], *rest, masks)


@calls("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_rows(draw: Draw, op: str) -> Example:
    """With equal values: the first place counts; sometimes with a window that is -inf throughout."""
    n = dims_in(op)
    x = draw.below(4, draw.size(1, 2), 2, *(draw.size(6, 9) if d == 0 else draw.size(3, 6) for d in range(n)))
    x = x.to(torch.float64)
    if draw.chance(0.2):
        x = torch.full_like(x, -torch.inf)
    kernel, stride, padding, dilation = draw.pick((3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 1), (2, 1, 0, 2), (2, 2, 1, 1))
    return example(op, x, [kernel] * n, [stride] * n, [padding] * n, [dilation] * n, draw.chance(0.3))


@calls("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_rows_backward(draw: Draw, op: str) -> Example:
    call = max_pool_rows(draw, op.removesuffix("_backward"))
    y, where = run_op(call.op, call.args, call.tensors)
    assert y is not None
    return example(op, draw.real(*y.shape), call.tensors[0], *call.args[1:], where)


@calls("avg_pool1d", "avg_pool2d", "avg_pool3d", "avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_rows(draw: Draw, op: str) -> Example:
    n = dims_in(op)
    x = draw.real(draw.size(1, 2), 2, *(draw.size(6, 9) if d == 0 else draw.size(3, 6) for d in range(n)))
    kernel, stride, padding = draw.pick((3, 2, 1), (2, 2, 0), (3, 1, 1), (2, 1, 0), (2, 2, 1))
    rest = [[kernel] * n, [stride] * n, [padding] * n, draw.chance(0.2), draw.chance(0.8)]
    if not op.endswith("_backward"):
        return example(op, x, *rest)
    rest.append(draw.pick(None, 3))
    y = getattr(torch.ops.aten, op.removesuffix("_backward"))(x, *rest)
    return example(op, draw.real(*y.shape), x, *rest)


def planes(draw: Draw, dims: int) -> torch.Tensor:
    lead = (draw.size(1, 4), draw.size(1, 4)) if draw.chance(0.8) else (draw.size(1, 4),)
    return draw.distinct(*lead, *(4 for _ in range(dims)))


def dims_in(op: str) -> int:
    return next(n for n in (1, 2, 3) if f"{n}d" in op)


@calls("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(draw: Draw, op: str) -> Example:
    n = dims_in(op)
    return example(op, planes(draw, n), [2] * n, [draw.pick(1, 2)] * n, [draw.pick(0, 1)] * n)


@calls("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(draw: Draw, op: str) -> Example:
    n = dims_in(op)
    x, stride = planes(draw, n), draw.pick(1, 2)
    y, where = getattr(torch.ops.aten, op.removesuffix("_backward"))(x, [2] * n, [stride] * n)
    return example(op, draw.real(*y.shape), x, [2] * n, [stride] * n, [0] * n, [1] * n, False, where)


@calls(
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def adaptive_pool(draw: Draw, op: str) -> Example:
    n = dims_in(op)
    return example(op, planes(draw, n), [draw.pick(1, 2, 3)] * n)


@calls("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
def adaptive_max_pool_backward(draw: Draw, op: str) -> Example:
    n = dims_in(op)
    x = planes(draw, n)
    y, where = getattr(torch.ops.aten, op.removesuffix("_backward"))(x, [2] * n)
    return example(op, draw.real(*y.shape), x, where)


@calls("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(draw: Draw, op: str) -> Example:
    n = dims_in(op)
    x = planes(draw, n)
    return example(op, draw.real(*x.shape[:-n], *(2 for _ in range(n))), x)


@calls("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(draw: Draw, op: str) -> Example:
    n = dims_in(op)
    return example(op, planes(draw, n), [2] * n, [draw.pick(1, 2)] * n)


@calls("avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_backward(draw: Draw, op: str) -> Example:
    n = dims_in(op)
    x = planes(draw, n)
    return example(
        op, draw.real(*x.shape[:-n], *(2 for _ in range(n))), x, [2] * n, [2] * n, [0] * n, False, True, None
    )


RESAMPLED = (
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)), *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
)  # fmt: skip


@calls(*RESAMPLED, *(f"{op}_backward" for op in RESAMPLED), "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
def resampled(draw: Draw, op: str) -> Example:
    n = dims_in(op)
    b, c = draw.size(1, 4), draw.size(1, 4)
    aligned = () if "nearest" in op else (draw.chance(),)
    if op.endswith("_backward"):
        return example(op, draw.real(b, c, *(6 for _ in range(n))), [6] * n, [b, c, *(4 for _ in range(n))], *aligned)
    return example(op, draw.real(b, c, *(4 for _ in range(n))), [draw.pick(6, 2)] * n, *aligned)


@calls("pixel_shuffle", "pixel_unshuffle")
def pixels(draw: Draw, op: str) -> Example:
    return example(op, draw.real(draw.size(1, 4), 4, 4, 4), 2)


@calls("grid_sampler_2d", "grid_sampler_3d")
def grid(draw: Draw, op: str) -> Example:
    n = dims_in(op.replace("_2d", "2d").replace("_3d", "3d"))
    b, c = draw.size(1, 3), draw.size(1, 3)
    x, places = draw.real(b, c, *(4 for _ in range(n))), draw.real(b, *draw.pick((3, 4, 2), (2, 5, 2))[:n], n) / 2
    return example(op, x, places, 0, draw.pick(0, 1), False)


@calls("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_backward(draw: Draw, op: str) -> Example:
    n = dims_in(op.replace("_2d", "2d").replace("_3d", "3d"))
    b, c = draw.size(1, 3), draw.size(1, 3)
    space = draw.pick((3, 4, 2), (2, 5, 2))[:n]
    x, places = draw.real(b, c, *(4 for _ in range(n))), draw.real(b, *space, n) / 2
    return example(op, draw.real(b, c, *space), x, places, 0, draw.pick(0, 1), False, [True, True])


@calls("im2col")
def columns(draw: Draw) -> Example:
    return example("im2col", draw.real(draw.size(1, 4), draw.size(1, 4), 4, 4), [2, 2], [1, 1], [0, 0], [2, 2])


@calls("col2im")
def image(draw: Draw) -> Example:
    n, c = draw.size(1, 4), draw.size(1, 4)
    return example("col2im", draw.real(n, c * 4, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2])
