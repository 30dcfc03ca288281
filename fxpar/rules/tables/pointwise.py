"""Elementwise ops: every output dim is a loop over all operands, broadcast from the right.

A rule here is ``pointwise(linear)``: ``linear`` lists the tensor arguments in which the op is linear, jointly within
an entry, or is a function of the call that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpar.rules.factor_rule import Call, Factors, Group
from fxpar.rules.groups import loop, passes
from fxpar.rules.registry import rule

LinearEntries = Sequence[str] | Callable[[Call], Sequence[str]]


def broadcast_groups(call: Call) -> tuple[Group, ...]:
    """One group per output dim; an operand whose dim has size 1 or is missing does not carry it."""
    shape = next((out.shape for out in call.outputs if out is not None), ())
    groups: tuple[Group, ...] = ()
    for back in range(1, len(shape) + 1):
        size = shape[-back]
        inputs = {
            i: len(t.shape) - back for i, t in enumerate(call.inputs) if len(t.shape) >= back and t.shape[-back] == size
        }
        outputs = {o: len(shape) - back for o, out in enumerate(call.outputs) if out is not None}
        groups = loop(call, size, inputs, outputs) + groups
    return groups


def pointwise(linear: LinearEntries = ()) -> Callable[[Call], Factors]:
    """The rule of an elementwise op."""

    def factors(call: Call) -> Factors:
        entries = linear(call) if callable(linear) else linear
        return Factors(broadcast_groups(call), passes(call, *entries))

    factors.__name__ = "pointwise"
    return factors


# linear in the one tensor: the value itself, or scaled by a number
rule(
    [
        "alias", "detach", "clone", "lift_fresh_copy", "neg", "positive", "mul.Scalar", "div.Scalar", "_to_copy",
        "real", "imag", "_conj", "conj", "conj_physical", "_conj_physical", "resolve_conj", "resolve_neg", "_neg_view",
        "contiguous",
    ],
    pointwise(("0",)),
)  # fmt: skip

# jointly linear; with a Python number in place of the second tensor they are affine and nothing passes
rule(["add.Tensor", "sub.Tensor", "subtract.Tensor"], pointwise(("01",)))
rule("rsub.Tensor", pointwise(("01",)))
rule(["mul.Tensor", "multiply.Tensor"], pointwise(("0", "1")))
rule("div.Tensor", pointwise(("0",)))
rule("true_divide.Tensor", pointwise(("0",)))
rule("where.self", pointwise(("12",)))
rule("lerp.Scalar", pointwise(("01",)))
rule("lerp.Tensor", pointwise(("01",)))
rule("addcmul", pointwise(("01", "02")))
rule("addcdiv", pointwise(("01",)))
rule("complex", pointwise(("01",)))
# the first operand only gives shape and dtype
rule(["copy", "fill.Tensor"], pointwise(("1", "0>")))
rule("fill.Scalar", pointwise(("0>",)))
rule(["masked_fill.Scalar"], pointwise(lambda call: ("0",) if call.arg("value") == 0 else ()))
rule("masked_fill.Tensor", pointwise(("02",)))
rule(["tril", "triu"], "... i! j! -> ... i! j!", linear=("0",))

# derivatives: linear in the incoming gradient
rule(
    [
        "threshold_backward", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward",
        "leaky_relu_backward", "elu_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward",
        "softplus_backward", "softshrink_backward", "hardshrink_backward", "log_sigmoid_backward", "mish_backward",
        "native_dropout_backward", "logit_backward",
    ],
    pointwise(("0",)),
)  # fmt: skip
rule("_prelu_kernel", pointwise())
rule("_prelu_kernel_backward", pointwise(("0",)))

# no pending sum passes
rule(
    [
        "abs", "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "atan2", "bitwise_not", "ceil", "clamp",
        "clamp.Tensor", "clamp_min", "clamp_min.Tensor", "clamp_max", "clamp_max.Tensor", "cos", "cosh", "digamma",
        "elu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "frac", "gelu", "hardshrink", "hardsigmoid",
        "hardswish", "hardtanh", "isfinite", "isinf", "isnan", "leaky_relu", "lgamma", "log", "log10", "log1p", "log2",
        "logical_not", "logit", "mish", "nan_to_num", "reciprocal", "relu", "relu6", "round", "round.decimals", "rsqrt",
        "selu", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh", "softplus", "softshrink",
        "special_entr", "special_expit", "special_log_ndtr", "special_ndtr", "special_xlog1py", "sqrt", "square", "tan",
        "tanh", "threshold", "trunc", "log_sigmoid_forward", "polygamma",
    ],
    pointwise(),
)  # fmt: skip
rule(
    [
        "add.Scalar", "sub.Scalar", "rsub.Scalar", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
        "div.Tensor_mode", "div.Scalar_mode", "floor_divide", "floor_divide.Scalar", "fmod.Scalar", "fmod.Tensor",
        "remainder.Scalar", "remainder.Tensor", "remainder.Scalar_Tensor", "maximum", "minimum", "fmax", "fmin",
        "hypot",
        "logaddexp", "logaddexp2", "copysign.Tensor", "copysign.Scalar", "nextafter", "heaviside", "xlogy.Tensor",
        "xlogy.Scalar_Other", "xlogy.Scalar_Self", "gcd", "lcm", "polar",
        "where.ScalarOther", "where.ScalarSelf", "where.Scalar",
    ],
    pointwise(),
)  # fmt: skip
rule(
    [f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")]
    + ["logical_and", "logical_or", "logical_xor"]
    + [
        f"bitwise_{name}.{kind}"
        for name in ("and", "or", "xor", "left_shift", "right_shift")
        for kind in ("Tensor", "Scalar" if name in ("and", "or", "xor") else "Tensor_Scalar", "Scalar_Tensor")
    ]
    + ["__and__.Tensor", "__or__.Tensor", "__xor__.Tensor", "__lshift__.Scalar", "__rshift__.Scalar"],
    pointwise(),
)
