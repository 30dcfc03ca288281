"""Parts of softmax, layer norm, RMS norm and the like that one rank computes when a row is cut over ranks.

What a row needs of all ranks are one or two numbers (its maximum, its total, its centred squares), kept with size 1 in
the reduced dims. An empty piece gives the neutral number. Totals are kept in float32 for 16-bit values. The variance
comes from a second pass over centred values, as accurate as on one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.rules.ops.attention import wide
from fxpar.rules.ops.random import LIBRARY

LIBRARY.define("row_max(Tensor x, int[] dim) -> Tensor")
LIBRARY.define("row_exp_total(Tensor x, Tensor top, int[] dim, bool finite) -> Tensor")
LIBRARY.define("row_softmax(Tensor x, Tensor top, Tensor total, ScalarType dtype, bool safe) -> Tensor")
LIBRARY.define("row_log_softmax(Tensor x, Tensor top, Tensor total, ScalarType dtype) -> Tensor")
LIBRARY.define("row_log_total(Tensor top, Tensor total, int[] dim, bool keepdim, ScalarType dtype) -> Tensor")
LIBRARY.define("row_products(Tensor a, Tensor b, int[] dim) -> Tensor")
LIBRARY.define("row_softmax_grad(Tensor grad, Tensor output, Tensor total, ScalarType dtype) -> Tensor")
LIBRARY.define("row_log_softmax_grad(Tensor grad, Tensor output, Tensor total, ScalarType dtype) -> Tensor")
LIBRARY.define("row_total(Tensor x, int[] dim) -> Tensor")
LIBRARY.define("row_squares(Tensor x, Tensor? total, int count, int[] dim) -> Tensor")
LIBRARY.define(
    "row_norm(Tensor x, Tensor? total, Tensor squares, Tensor? weight, Tensor? bias, int count, float? eps, "
    "ScalarType kept) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "row_norm_grad_totals(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, int[] dim) -> Tensor"
)
LIBRARY.define(
    "row_norm_grad(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? totals, int count, "
    "int[] rows, bool[] wanted) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define("row_power_total(Tensor x, float ord, int[] dim, ScalarType dtype) -> Tensor")


def row_max(x: Tensor, dim: Sequence[int]) -> Tensor:
    """The largest value along ``dim``, -inf of an empty piece."""
    if 0 in (x.shape[d] for d in dim):
        return x.new_full([1 if d in dim else size for d, size in enumerate(x.shape)], -math.inf)
    return x.amax(list(dim), keepdim=True)


def without_infinities(top: Tensor) -> Tensor:
    return top.masked_fill(top.abs() == math.inf, 0.0)


def row_exp_total(x: Tensor, top: Tensor, dim: Sequence[int], finite: bool) -> Tensor:
    """The sum of ``exp(x - top)``; ``finite``: an infinite ``top`` counts as 0, so that a row of -inf gives 0."""
    middle = without_infinities(top) if finite else top
    kind = wide(x.dtype)
    return (x.to(kind) - middle.to(kind)).exp_().sum(list(dim), keepdim=True)


def row_softmax(x: Tensor, top: Tensor, total: Tensor, dtype: torch.dtype, safe: bool) -> Tensor:
    """``exp(x - top) / total``; ``safe``: 0 in a row of -inf."""
    kind = total.dtype
    if safe:
        top = without_infinities(top)
        total = total.masked_fill(total == 0, 1.0)
    return (x.to(kind) - top.to(kind)).exp_().div_(total).to(dtype)


def row_log_softmax(x: Tensor, top: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """``x - top - log(total)``."""
    kind = total.dtype
    return (x.to(kind) - top.to(kind)).sub_(total.log()).to(dtype)


def row_log_total(top: Tensor, total: Tensor, dim: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """``top + log(total)``, where an infinite ``top`` counts as 0."""
    result = (without_infinities(top).to(total.dtype) + total.log()).to(dtype)
    return result if keepdim else result.squeeze(list(dim))


def row_products(a: Tensor, b: Tensor, dim: Sequence[int]) -> Tensor:
    """The sum of ``a * b``."""
    kind = wide(a.dtype)
    return (a.to(kind) * b.to(kind)).sum(list(dim), keepdim=True)


def row_softmax_grad(grad: Tensor, output: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """``(grad - total) * output``, total = sum(grad * output)."""
    return (grad.to(total.dtype) - total).mul_(output.to(total.dtype)).to(dtype)


def row_log_softmax_grad(grad: Tensor, output: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad - exp(output) * total``, total = sum(grad)."""
    kind = total.dtype
    return (grad.to(kind) - output.to(kind).exp() * total).to(dtype)


def row_total(x: Tensor, dim: Sequence[int]) -> Tensor:
    """The sum along ``dim``."""
    return x.sum(list(dim), keepdim=True, dtype=wide(x.dtype))


def row_squares(x: Tensor, total: Tensor | None, count: int, dim: Sequence[int]) -> Tensor:
    """The sum of ``(x - total / count)^2``; without a total of ``x^2``."""
    values = x.to(wide(x.dtype))
    centred = values if total is None else values - total / count
    return (centred * centred).sum(list(dim), keepdim=True)


def row_norm(
    x: Tensor, total: Tensor | None, squares: Tensor, weight: Tensor | None, bias: Tensor | None, count: int,
    eps: float | None, kept: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised and scaled ``x``, mean, 1 / deviation), the last two in dtype ``kept``; no mean without a total."""
    kind = squares.dtype
    rstd = (squares / count + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    mean = squares.new_empty(0) if total is None else total / count
    out = x.to(kind) * rstd if total is None else (x.to(kind) - mean) * rstd
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype), mean.to(kept), rstd.to(kept)


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor, kind: torch.dtype) -> Tensor:
    return (x.to(kind) - mean.to(kind)) * rstd.to(kind)


def row_norm_grad_totals(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, dim: Sequence[int]
) -> Tensor:
    """``[2, ...]``: the sums of ``g`` and of ``g * normalised``, g = grad * weight."""
    kind = wide(x.dtype)
    slope = grad.to(kind) if weight is None else grad.to(kind) * weight.to(kind)
    along = (slope * _normalised(x, mean, rstd, kind)).sum(list(dim), keepdim=True)
    return torch.stack((slope.sum(list(dim), keepdim=True), along))


def row_norm_grad(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, totals: Tensor | None,
    count: int, rows: Sequence[int], wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, weight and bias, those that are ``wanted`` (else empty).

    ``totals`` as in ``row_norm_grad_totals``, of all ranks; ``rows``: the dims over which weight and bias are shared.
    """
    kind = wide(x.dtype)
    given = grad.to(kind)
    normalised = _normalised(x, mean, rstd, kind)
    nothing = x.new_empty(0)
    of_x = of_weight = of_bias = nothing
    if wanted[0] and totals is not None:
        slope = given if weight is None else given * weight.to(kind)
        lost = normalised * (totals[1] / count) + totals[0] / count
        of_x = ((slope - lost) * rstd.to(kind)).to(x.dtype)
    made = x.dtype if weight is None else weight.dtype
    if wanted[1]:
        product = given * normalised
        of_weight = (product.sum(list(rows)) if rows else product).to(made)
    if wanted[2]:
        of_bias = (given.sum(list(rows)) if rows else given.clone()).to(made)
    return of_x, of_weight, of_bias


def row_power_total(x: Tensor, ord: float, dim: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The sum of ``|x|^ord``, without the reduced dims' size."""
    values = x.to(dtype)
    return (values * values if ord == 2.0 else values.abs().pow(ord)).sum(list(dim), keepdim=True)


for _name, _function in (
    ("row_max", row_max), ("row_exp_total", row_exp_total), ("row_softmax", row_softmax),
    ("row_log_softmax", row_log_softmax), ("row_log_total", row_log_total), ("row_products", row_products),
    ("row_softmax_grad", row_softmax_grad), ("row_log_softmax_grad", row_log_softmax_grad), ("row_total", row_total),
    ("row_squares", row_squares), ("row_norm", row_norm), ("row_norm_grad_totals", row_norm_grad_totals),
    ("row_norm_grad", row_norm_grad), ("row_power_total", row_power_total),
):  # fmt: skip
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
