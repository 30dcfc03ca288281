"""Softmax, norms and reductions over a row that is cut: one or two numbers per row go through an all-reduce.

    softmax       top = max x;  total = sum exp(x - top);   exp(x - top) / total
    its backward  total = sum grad * out;                   (grad - total) * out
    layer norm    total = sum x;  squares = sum (x - total / n)^2;   (x - mean) * rstd * weight + bias
    its backward  totals = sum g, sum g * x^;               (g - totals_0 / n - x^ * totals_1 / n) * rstd

RMS norm is layer norm without the mean. Loops of a row carry the word ``ROW``.
"""

from __future__ import annotations

from math import prod

from fxpar.plans.program import Arg, Dtype, Ref
from fxpar.rules.expansion import Emission
from fxpar.rules.factor_rule import Call
from fxpar.rules.groups import dims_of
from fxpar.rules.ops import row_parts  # noqa: F401  registers the ops

ROW = "row"

Results = tuple[Ref | None, ...]


def _dtype(e: Emission, output: int = 0) -> Dtype:
    made = e.call.outputs[output]
    assert made is not None
    return Dtype(made.dtype)


def _along(call: Call) -> tuple[int, ...]:
    return dims_of(call.arg("dim"), len(call.shape(0)))


def _exp_totals(e: Emission, dims: tuple[int, ...], finite: bool) -> tuple[Ref, Ref]:
    """(maximum, sum of exponentials) of whole rows."""
    (top,) = e.op("fxpar.row_max.default", Ref(0), dims)
    top = e.all_reduce(top, "max", ROW)
    (total,) = e.op("fxpar.row_exp_total.default", Ref(0), top, dims, finite)
    return top, e.all_reduce(total, "sum", ROW)


def split_softmax(e: Emission) -> Results:
    """``_softmax``, ``softmax.int`` and ``_safe_softmax``, in which a row of -inf gives 0."""
    safe = "safe" in e.call.op
    top, total = _exp_totals(e, _along(e.call), safe)
    return e.op("fxpar.row_softmax.default", Ref(0), top, total, _dtype(e), safe)


def split_log_softmax(e: Emission) -> Results:
    top, total = _exp_totals(e, _along(e.call), False)
    return e.op("fxpar.row_log_softmax.default", Ref(0), top, total, _dtype(e))


def split_softmax_backward(e: Emission) -> Results:
    (total,) = e.op("fxpar.row_products.default", Ref(0), Ref(1), _along(e.call))
    total = e.all_reduce(total, "sum", ROW)
    return e.op("fxpar.row_softmax_grad.default", Ref(0), Ref(1), total, _dtype(e))


def split_log_softmax_backward(e: Emission) -> Results:
    (total,) = e.op("fxpar.row_total.default", Ref(0), _along(e.call))
    total = e.all_reduce(total, "sum", ROW)
    return e.op("fxpar.row_log_softmax_grad.default", Ref(0), Ref(1), total, _dtype(e))


def split_logsumexp(e: Emission) -> Results:
    dims = _along(e.call)
    top, total = _exp_totals(e, dims, True)
    return e.op("fxpar.row_log_total.default", top, total, dims, e.call.arg("keepdim"), _dtype(e))


def _row_dims(call: Call, operand: int) -> tuple[int, ...]:
    rank = len(call.shape(operand))
    return tuple(range(rank - len(call.arg("normalized_shape")), rank))


def split_norm(e: Emission) -> Results:
    """``native_layer_norm`` and ``_fused_rms_norm``."""
    call, x = e.call, e.operand("input")
    dims, count = _row_dims(call, x.id), prod(call.arg("normalized_shape"))
    weight = call.arg("weight")
    centred = call.has("bias")
    total: Arg = None
    if centred:
        (found,) = e.op("fxpar.row_total.default", x, dims)
        total = e.all_reduce(found, "sum", ROW)
    (squares,) = e.op("fxpar.row_squares.default", x, total, count, dims)
    squares = e.all_reduce(squares, "sum", ROW)
    bias = call.arg("bias") if centred else None
    kept = _dtype(e, 1) if call.outputs[1] is not None else Dtype(e.dtype(squares))
    out, mean, rstd = e.op(
        "fxpar.row_norm.default", x, total, squares, weight, bias, count, call.arg("eps"), kept,
        wanted=(True, centred, True),
    )  # fmt: skip
    made = (out, mean, rstd) if centred else (out, rstd)
    return tuple(v if o is not None else None for v, o in zip(made, call.outputs, strict=True))


def split_norm_backward(e: Emission) -> Results:
    """``native_layer_norm_backward``."""
    call = e.call
    grad, x, mean, rstd = (e.operand(name) for name in ("grad_out", "input", "mean", "rstd"))
    weight = call.arg("weight")
    dims, count = _row_dims(call, x.id), prod(call.arg("normalized_shape"))
    wanted = [made is not None for made in call.outputs]
    totals: Arg = None
    if wanted[0]:
        (found,) = e.op("fxpar.row_norm_grad_totals.default", grad, x, mean, rstd, weight, dims)
        totals = e.all_reduce(found, "sum", ROW)
    rows = tuple(range(dims[0]))
    made = e.op(
        "fxpar.row_norm_grad.default", grad, x, mean, rstd, weight, totals, count, rows, tuple(wanted), wanted=wanted
    )
    return tuple(v if keep else None for v, keep in zip(made, wanted, strict=True))


def split_vector_norm(e: Emission) -> Results:
    """``linalg_vector_norm`` of a finite, positive order."""
    call = e.call
    order = float(call.arg("ord"))
    dims = dims_of(call.arg("dim"), len(call.shape(0)))
    (total,) = e.op("fxpar.row_power_total.default", Ref(0), order, dims, _dtype(e))
    total = e.all_reduce(total, "sum", ROW)
    if order == 2.0:
        (norm,) = e.op("aten.sqrt.default", total)
    else:
        (norm,) = e.op("aten.pow.Tensor_Scalar", total, 1.0 / order)
    return (norm,) if call.arg("keepdim") else e.op("aten.squeeze.dims", norm, dims)
