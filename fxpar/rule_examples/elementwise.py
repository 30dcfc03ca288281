"""Generators of elementwise calls, made from the schema: every tensor argument gets data, every scalar a number."""

from __future__ import annotations

from typing import Any

import torch

from fxpar.rule_examples.draw import GENERATORS, Draw, calls
from fxpar.rules.factor_rule import torch_op
from fxpar.rules.registry import all_rules, full_name
from fxpar.rules.soundness import Example, example

INTEGERS = ("bitwise", "__and", "__or", "__xor", "__lshift", "__rshift", "gcd", "lcm")
SAME_SHAPE = ("_backward", "log_sigmoid_forward")
WRITTEN = {
    "_to_copy", "masked_fill.Scalar", "masked_fill.Tensor", "where.self", "complex", "polar", "real", "imag", "copy",
    "fill.Tensor", "_prelu_kernel", "_prelu_kernel_backward", "native_dropout_backward", "log_sigmoid_backward",
    "log_sigmoid_forward", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", "polygamma", "_neg_view",
    "round.decimals", "_conj",
}  # fmt: skip


def short_name(op: str) -> str:
    """``"aten.add.Tensor"`` -> ``"add.Tensor"``, ``"aten.mm.default"`` -> ``"mm"``."""
    namespace, name, overload = op.split(".")
    short = name if overload == "default" else f"{name}.{overload}"
    return short if namespace == "aten" else f"{namespace}::{short}"


def from_schema(draw: Draw, op: str) -> Example:
    shape = draw.shape()
    values: list[Any] = []
    first = True
    for argument in torch_op_of(op)._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            break
        if kind == "Tensor":
            own = shape if first or any(word in op for word in SAME_SHAPE) else draw.broadcast(shape)
            # a divisor of 0 makes infinities, of which sums are nothing
            kinds = (draw.positive,) if "div" in op and not first else (draw.real, draw.unit, draw.positive)
            first = False
            if any(op.startswith(word) for word in INTEGERS):
                values.append(draw.below(7, *own))
            else:
                values.append(draw.pick(*kinds)(*own))
        elif kind == "Optional[Tensor]":
            values.append(draw.real(*draw.broadcast(shape)))
        elif kind == "Optional[number]":
            values.append(-0.5)
        elif argument.default_value is not None:
            break
        elif kind == "number":
            values.append(2 if any(op.startswith(word) for word in INTEGERS) or "shift" in op else draw.pick(2.0, 0.5))
        elif kind == "bool":
            values.append(draw.chance())
        elif kind == "float":
            values.append(0.5)
        elif kind == "str":
            values.append("none")
        elif kind == "Optional[float]":
            values.append(0.1)
        else:
            raise ValueError(f"{op}: no value for {kind}")
    more = {"rounding_mode": draw.pick("floor", "trunc", None)} if op.endswith("_mode") else {}
    return example(op, *values, **more)


def torch_op_of(op: str) -> torch._ops.OpOverload:
    return torch_op(full_name(op))


def declare_elementwise() -> None:
    for rule in all_rules():
        op = short_name(rule.op)
        if rule.text == "pointwise" and op not in WRITTEN:

            def generate(draw: Draw, op: str = op) -> Example:
                return from_schema(draw, op)

            GENERATORS.setdefault(op, []).append(generate)


declare_elementwise()


@calls("add.Tensor", "sub.Tensor")
def sum_with_number(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.shape()), 1.5, alpha=2)


@calls("add.Tensor", "mul.Tensor", "sub.Tensor")
def with_integers(draw: Draw, op: str) -> Example:
    shape = draw.shape()
    return example(op, draw.real(*shape), draw.below(5, *draw.broadcast(shape)))


@calls("add.Tensor")
def narrow_and_wide(draw: Draw) -> Example:
    shape = draw.shape()
    return example("add.Tensor", draw.real(*shape).float(), draw.real(*shape))


@calls("mul.Tensor", "div.Tensor")
def times_number(draw: Draw, op: str) -> Example:
    return example(op, draw.real(*draw.shape()), -2.5)


@calls("_to_copy")
def cast(draw: Draw) -> Example:
    source = draw.pick(torch.float64, torch.float32, torch.int64, torch.bool)
    target = draw.pick(torch.float64, torch.float32, torch.bfloat16, torch.int64)
    return example("_to_copy", (draw.real(*draw.shape()) * 4).to(source), dtype=target)


@calls("masked_fill.Scalar")
def filled_where(draw: Draw) -> Example:
    shape = draw.shape()
    value = draw.pick(0, 0.0, 2.0, float("-inf"))
    return example("masked_fill.Scalar", draw.real(*shape), draw.mask(*draw.broadcast(shape)), value)


@calls("masked_fill.Tensor")
def filled_with_tensor(draw: Draw) -> Example:
    shape = draw.shape()
    return example("masked_fill.Tensor", draw.real(*shape), draw.mask(*draw.broadcast(shape)), draw.real())


@calls("where.self")
def chosen(draw: Draw) -> Example:
    shape = draw.shape()
    return example(
        "where.self", draw.mask(*draw.broadcast(shape)), draw.real(*draw.broadcast(shape)), draw.real(*shape)
    )


@calls("where.ScalarOther")
def chosen_or_number(draw: Draw) -> Example:
    shape = draw.shape()
    return example("where.ScalarOther", draw.mask(*draw.broadcast(shape)), draw.real(*shape), 0.5)


@calls("where.ScalarSelf")
def number_or_chosen(draw: Draw) -> Example:
    shape = draw.shape()
    return example("where.ScalarSelf", draw.mask(*draw.broadcast(shape)), 0.5, draw.real(*shape))


@calls("where.Scalar")
def chosen_number(draw: Draw) -> Example:
    return example("where.Scalar", draw.mask(*draw.shape()), 0.5, -1.0)


@calls("complex", "polar")
def complex_of(draw: Draw, op: str) -> Example:
    shape = draw.shape()
    return example(op, draw.positive(*shape), draw.real(*shape))


@calls("real", "imag", "_conj", "conj_physical", "mul.Tensor", "abs", "clone", "add.Tensor", "neg", "_neg_view")
def of_complex(draw: Draw, op: str) -> Example:
    shape = draw.shape()
    z = torch.complex(draw.real(*shape), draw.real(*shape))
    more = (torch.complex(draw.real(*shape), draw.real(*shape)),) if op in ("mul.Tensor", "add.Tensor") else ()
    return example(op, z, *more)


@calls("copy")
def copied(draw: Draw) -> Example:
    shape = draw.shape()
    return example("copy", draw.real(*shape), draw.real(*draw.broadcast(shape)))


@calls("fill.Tensor")
def filled_by(draw: Draw) -> Example:
    return example("fill.Tensor", draw.real(*draw.shape()), draw.real())


@calls("_prelu_kernel")
def prelu(draw: Draw) -> Example:
    shape = draw.shape(2, 3)
    return example("_prelu_kernel", draw.real(*shape), draw.real(1, shape[1], *(1 for _ in shape[2:])))


@calls("_prelu_kernel_backward")
def prelu_backward(draw: Draw) -> Example:
    shape = draw.shape(2, 3)
    weight = draw.real(1, shape[1], *(1 for _ in shape[2:]))
    return example("_prelu_kernel_backward", draw.real(*shape), draw.real(*shape), weight)


@calls("native_dropout_backward")
def dropout_backward(draw: Draw) -> Example:
    shape = draw.shape()
    return example("native_dropout_backward", draw.real(*shape), draw.mask(*shape), 1.25)


@calls("log_sigmoid_forward")
def log_sigmoid(draw: Draw) -> Example:
    return example("log_sigmoid_forward", draw.real(*draw.shape()))


@calls("log_sigmoid_backward")
def log_sigmoid_backward(draw: Draw) -> Example:
    x = draw.real(*draw.shape())
    buffer = torch.ops.aten.log_sigmoid_forward(x)[1]
    if buffer.shape != x.shape:
        buffer = torch.exp(-x.abs())
    return example("log_sigmoid_backward", draw.real(*x.shape), x, buffer)


@calls("polygamma")
def polygamma(draw: Draw) -> Example:
    return example("polygamma", 1, draw.positive(*draw.shape()))


@calls("round.decimals")
def rounded(draw: Draw) -> Example:
    return example("round.decimals", draw.real(*draw.shape()), decimals=1)


@calls("nan_to_num")
def with_nans(draw: Draw) -> Example:
    shape = draw.shape()
    return example("nan_to_num", torch.where(draw.mask(*shape), draw.real(*shape), torch.nan))
