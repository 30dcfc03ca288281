"""Ops taken apart while tracing: means and variances, losses, batch and group norm.

Only ops whose whole form hides a global count or batch statistic, or a reduction that a mesh axis may cut (the dim of
log_softmax), are here; each becomes sums (which may stay pending
across ranks), pointwise ops and division by a constant of the GLOBAL shape. Everything else stays whole. Formulas
are those of the torch documentation of the functional of the same name; reductions are 0 none, 1 mean, 2 sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

TABLE: dict[Any, Callable[..., Any]] = {}


def decomposes(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function under the ops it takes apart."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            TABLE[op] = function
        return function

    return enter


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sums of ``dtype`` are kept."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def every_dim(x: Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """Reduced dims, none given meaning all, as non-negative numbers."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return list(range(x.dim()))
    return [d % x.dim() if x.dim() else 0 for d in ([dims] if isinstance(dims, int) else dims)]


def count(x: Tensor, dims: Sequence[int]) -> int:
    """Elements of one reduction over ``dims``."""
    return math.prod(x.shape[d] for d in dims) if x.dim() else 1


def averaged(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    """Mean over ``dims`` as a sum over a constant."""
    return x.sum(dims, keepdim=keepdim) / count(x, dims) if x.dim() else x


def reduced(x: Tensor, reduction: int) -> Tensor:
    """A pointwise loss under its reduction."""
    if reduction == 0:
        return x
    total = x.to(wide(x.dtype)).sum()
    return (total / x.numel() if reduction == 1 else total).to(x.dtype)


def per_element(grad: Tensor, shape_of: Tensor, reduction: int) -> Tensor:
    """Gradient of a pointwise loss before its reduction (broadcasting)."""
    return grad / shape_of.numel() if reduction == 1 else grad


@decomposes(aten.mean.default, aten.mean.dim)
def mean(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    result = dtype or x.dtype
    return averaged(x.to(wide(result)), every_dim(x, dim), keepdim).to(result)


def variance(
    x: Tensor, dim: int | Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """(variance, mean), the variance from a second pass over centred values."""
    dims = every_dim(x, dim)
    values = x.to(wide(x.dtype))
    middle = averaged(values, dims, True)
    centred = values - middle
    divisor = max(0.0, count(x, dims) - (1 if correction is None else correction))
    squares = (centred * centred).sum(dims, keepdim=keepdim) if x.dim() else centred * centred
    if not keepdim:
        for d in sorted(dims, reverse=True):
            middle = middle.squeeze(d)
    return squares / divisor if divisor else squares / torch.zeros_like(squares), middle


@decomposes(aten.var.correction)
def var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    if x.is_complex():
        return NotImplemented
    return variance(x, dim, correction, keepdim)[0].to(x.dtype)


@decomposes(aten.std.correction)
def std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    if x.is_complex():
        return NotImplemented
    return variance(x, dim, correction, keepdim)[0].sqrt().to(x.dtype)


@decomposes(aten.var_mean.correction)
def var_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    if x.is_complex():
        return NotImplemented
    spread, middle = variance(x, dim, correction, keepdim)
    return spread.to(x.dtype), middle.to(x.dtype)


@decomposes(aten.std_mean.correction)
def std_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    if x.is_complex():
        return NotImplemented
    spread, middle = variance(x, dim, correction, keepdim)
    return spread.sqrt().to(x.dtype), middle.to(x.dtype)


@decomposes(aten._log_softmax.default)
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if x.dim() == 0 or x.numel() == 0:
        return NotImplemented
    values = x.to(wide(x.dtype))
    top = values.amax(dim, keepdim=True)
    total = torch.ops.fxpar.sum_exp(values, top, dim)
    result = torch.ops.fxpar.log_probs(values, top, total)
    return result if half_to_float else result.to(x.dtype)


@decomposes(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    if grad.dim() == 0 or grad.numel() == 0:
        return NotImplemented
    values, result = grad.to(wide(grad.dtype)), output.to(wide(output.dtype))
    total = values.sum(dim, keepdim=True)
    return torch.ops.fxpar.log_probs_backward(values, result, total).to(input_dtype)


def all_but(x: Tensor, dim: int) -> list[int]:
    """Every dim of ``x`` except ``dim``."""
    return [d for d in range(x.dim()) if d != dim % x.dim()]


@decomposes(aten._weight_norm_interface.default)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norms = (v * v).sum(all_but(v, dim), keepdim=True).sqrt()
    return v * (g / norms), norms


@decomposes(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    along = (grad * v).sum(all_but(v, dim), keepdim=True)
    return (g / norms) * grad - (g / (norms * norms * norms)) * v * along, along / norms


@decomposes(aten.mse_loss.default)
def mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    difference = x - target
    return reduced(difference * difference, reduction)


@decomposes(aten.mse_loss_backward.default)
def mse_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    return (x - target) * 2.0 * per_element(grad, x, reduction)


@decomposes(aten.smooth_l1_loss.default)
def smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    distance = (x - target).abs()
    if beta == 0.0:
        return reduced(distance, reduction)
    return reduced(torch.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta), reduction)


@decomposes(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    difference = x - target
    slope = difference.sign()
    if beta != 0.0:
        slope = torch.where(difference.abs() < beta, difference / beta, slope)
    return slope * per_element(grad, x, reduction)


@decomposes(aten.huber_loss.default)
def huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    distance = (x - target).abs()
    loss = torch.where(distance < delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))
    return reduced(loss, reduction)


@decomposes(aten.huber_loss_backward.default)
def huber_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    difference = x - target
    slope = torch.where(difference.abs() < delta, difference, delta * difference.sign())
    return slope * per_element(grad, x, reduction)


@decomposes(aten.binary_cross_entropy.default)
def binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    logs = target * x.log().clamp(min=-100.0) + (1.0 - target) * (1.0 - x).log().clamp(min=-100.0)
    return reduced(-logs if weight is None else -logs * weight, reduction)


@decomposes(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    slope = (x - target) / ((1.0 - x) * x).clamp(min=1e-12)
    if weight is not None:
        slope = slope * weight
    return slope * per_element(grad, x, reduction)


@decomposes(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    minus_log_sigmoid = (-x).relu() + (-x.abs()).exp().log1p()
    if pos_weight is not None:
        minus_log_sigmoid = ((pos_weight - 1.0) * target + 1.0) * minus_log_sigmoid
    loss = (1.0 - target) * x + minus_log_sigmoid
    return reduced(loss if weight is None else loss * weight, reduction)


def class_weights(
    target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(class number safe to look up, weight of each label: 0 where ignored)."""
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    if weight is None:
        return safe, valid.to(dtype)
    return safe, torch.where(valid, aten.index.Tensor(weight, [safe]), 0.0)


@decomposes(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """x [n, c, ...], target [n, ...] (or [c] and a scalar) -> (loss, total weight of the labels)."""
    class_dim = 1 if x.dim() > 1 else 0
    safe, weights = class_weights(target, weight, ignore_index, x.dtype)
    picked = x.gather(class_dim, safe.unsqueeze(class_dim)).squeeze(class_dim)
    # An ignored class may hold -inf: select, do not multiply.
    loss = torch.where(target != ignore_index, -picked * weights, 0.0)
    if reduction == 0:
        return loss, x.new_zeros(())
    precise = wide(x.dtype)
    total_weight = weights.to(precise).sum()
    total = loss.to(precise).sum()
    return (total / total_weight if reduction == 1 else total).to(x.dtype), total_weight.to(x.dtype)


@decomposes(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """The gradient by comparing class numbers: no scatter, so that batch and classes may both be cut."""
    class_dim = 1 if x.dim() > 1 else 0
    _, weights = class_weights(target, weight, ignore_index, x.dtype)
    slope = -weights * (grad / total_weight if reduction == 1 else grad)
    classes = torch.arange(x.shape[class_dim], device=x.device)
    classes = classes.view([-1] + [1] * (x.dim() - 1 - class_dim))
    return torch.where(classes == target.unsqueeze(class_dim), slope.unsqueeze(class_dim), 0.0)


def per_channel(x: Tensor, dims: int) -> Tensor:
    """``[c] -> [c, 1, ...]`` against ``[n, c, ...]`` of ``dims`` dims."""
    return x.view([-1] + [1] * (dims - 2))


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``x [n, c, ...]`` times ``weight [c]`` plus ``bias [c]``, each where given."""
    if weight is not None:
        x = x * per_channel(weight, x.dim())
    return x if bias is None else x + per_channel(bias, x.dim())


def batch_norm_train(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """(out, mean [c], rstd [c], biased variance [c])."""
    values = x.to(wide(x.dtype))
    dims = [0, *range(2, x.dim())]
    elements = count(x, dims)
    middle = values.sum(dims) / elements
    centred = values - per_channel(middle, x.dim())
    spread = (centred * centred).sum(dims) / elements
    rstd = (spread + eps).rsqrt()
    out = scaled(centred * per_channel(rstd, x.dim()), weight, bias)
    return out.to(x.dtype), middle, rstd, spread


def batch_norm_eval(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    values = x.to(wide(x.dtype))
    rstd = (variance + eps).rsqrt()
    out = (values - per_channel(mean, x.dim())) * per_channel(rstd, x.dim())
    return scaled(out, weight, bias).to(x.dtype)


@decomposes(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Batch statistics over the global batch; running variance unbiased over the global count."""
    if not training:
        out = batch_norm_eval(x, weight, bias, running_mean, running_var, eps)
        return out, x.new_zeros(0), x.new_zeros(0), running_mean, running_var
    out, middle, rstd, spread = batch_norm_train(x, weight, bias, eps)
    elements = x.numel() // x.shape[1]
    unbiased = spread * (elements / max(elements - 1, 1))
    new_mean = (1.0 - momentum) * running_mean + momentum * middle.to(running_mean.dtype)
    new_var = (1.0 - momentum) * running_var + momentum * unbiased.to(running_var.dtype)
    return out, middle, rstd, new_mean, new_var


@decomposes(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return batch_norm_train(x, weight, bias, eps)[:3]


@decomposes(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    out = batch_norm_eval(x, weight, bias, running_mean, running_var, eps)
    return out, x.new_zeros(0), x.new_zeros(0)


@decomposes(aten.native_batch_norm.default)
def native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if training and running_mean is not None:
        return NotImplemented  # mutates its buffers: functionalisation must have replaced it
    if training:
        return batch_norm_train(x, weight, bias, eps)[:3]
    if running_mean is None or running_var is None:
        return NotImplemented
    return batch_norm_eval(x, weight, bias, running_mean, running_var, eps), x.new_zeros(0), x.new_zeros(0)


@decomposes(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    if train:
        mean, rstd = save_mean, save_invstd
    elif running_mean is not None and running_var is not None:
        mean, rstd = running_mean, (running_var + eps).rsqrt()
    else:
        mean = rstd = None
    if mean is None or rstd is None:
        return NotImplemented
    dims = [0, *range(2, x.dim())]
    slope = grad.to(wide(x.dtype))
    middle, inverse = per_channel(mean, x.dim()), per_channel(rstd, x.dim())
    normalised = (x.to(wide(x.dtype)) - middle) * inverse
    sum_grad = slope.sum(dims)
    sum_product = (slope * normalised).sum(dims)
    grad_x = None
    if output_mask[0]:
        grad_x = slope
        if train:
            elements = count(x, dims)
            grad_x = (
                slope
                - per_channel(sum_grad / elements, x.dim())
                - normalised * per_channel(sum_product / elements, x.dim())
            )
        grad_x = scaled(grad_x * inverse, weight, None).to(x.dtype)
    kind = x.dtype if weight is None else weight.dtype
    return (
        grad_x,
        sum_product.to(kind) if output_mask[1] else None,
        sum_grad.to(kind) if output_mask[2] else None,
    )


def in_groups(x: Tensor, groups: int) -> Tensor:
    """``[n, c, ...] -> [n, g, c/g, ...]``."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


@decomposes(aten.native_group_norm.default)
def native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, group: int, eps: float
) -> Any:
    if n == 0 or c == 0 or hxw == 0:
        return NotImplemented
    values = in_groups(x.to(wide(x.dtype)), group)
    dims = list(range(2, values.dim()))
    middle = averaged(values, dims, True)
    centred = values - middle
    rstd = (averaged(centred * centred, dims, True) + eps).rsqrt()
    out = (centred * rstd).reshape(x.shape)
    mean_and_rstd = (t.reshape(n, group).to(x.dtype) for t in (middle, rstd))
    return scaled(out, weight, bias).to(x.dtype), *mean_and_rstd


@decomposes(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: Sequence[bool],
) -> Any:
    if n == 0 or c == 0 or hxw == 0:
        return NotImplemented
    precise = wide(x.dtype)
    slope = grad.to(precise)
    ones = [1] * (x.dim() - 1)
    middle, inverse = (t.to(precise).reshape(n, group, *ones) for t in (mean, rstd))
    normalised = (in_groups(x.to(precise), group) - middle) * inverse
    channel_dims = [0, *range(2, x.dim())]
    grad_x = grad_weight = grad_bias = None
    kind = x.dtype if weight is None else weight.dtype
    if output_mask[0]:
        weighted = in_groups(scaled(slope, weight, None), group)
        dims = list(range(2, weighted.dim()))
        grad_x = weighted - averaged(weighted, dims, True) - normalised * averaged(weighted * normalised, dims, True)
        grad_x = (grad_x * inverse).reshape(x.shape).to(x.dtype)
    if output_mask[1]:
        grad_weight = (slope * normalised.reshape(x.shape)).sum(channel_dims).to(kind)
    if output_mask[2]:
        grad_bias = slope.sum(channel_dims).to(kind)
    return grad_x, grad_weight, grad_bias
