"""Run one op call of plain-data arguments on tensors, meta tensors included."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fxpar.plans.program import Arg, Dtype, Ref, TensorType
from fxpar.rules.factor_rule import torch_op


def run_op(op: str, args: tuple[Arg, ...], tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Run the call (``Ref.id`` numbers ``tensors``) and return its results as a row (a list result is spread)."""

    def real(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return tensors[arg.id]
        if isinstance(arg, Dtype):
            return getattr(torch, arg.name)
        if isinstance(arg, tuple):
            return [real(item) for item in arg]
        return arg

    target = torch_op(op)
    positional, keywords = [], {}
    for name, arg in zip(keyword_names(target), args, strict=True):
        if name is not None:
            keywords[name] = real(arg)
        else:
            positional.append(real(arg))
    returned = target(*positional, **keywords)
    row = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    return tuple(row[0]) if len(row) == 1 and isinstance(row[0], (tuple, list)) else row


@lru_cache(maxsize=4096)
def keyword_names(target: torch._ops.OpOverload) -> tuple[str | None, ...]:
    """Per schema argument its name if it is passed by keyword, else None."""
    return tuple(a.name if a.kwarg_only else None for a in target._schema.arguments)


def type_of(tensor: Tensor) -> TensorType:
    """Shape and dtype of a tensor."""
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@lru_cache(maxsize=100_000)
def result_types(op: str, args: tuple[Arg, ...], operands: tuple[TensorType, ...]) -> tuple[TensorType | None, ...]:
    """Types of the results of a call on operands of these types (``Ref.id`` numbers them)."""
    tensors = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in operands]
    return tuple(None if t is None else type_of(t) for t in run_op(op, args, tensors))
