"""How tensors lie in their storage, found out with meta tensors: whether a view of one is a copy."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from fxpar.plans.program import Arg
from fxpar.runtime.interpret import operator_of
from fxpar.runtime.local import torch_dtype
from fxpar.runtime.op_call import call_arguments, results

META = torch.device("meta")


class Strided(NamedTuple):
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def in_order(self) -> bool:
        """Contiguous, as torch says it: strides of dims of one element do not matter."""
        wanted = contiguous(self.shape)
        return 0 in self.shape or all(
            n == 1 or have == want for n, have, want in zip(self.shape, self.stride, wanted, strict=True))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


@lru_cache(maxsize=20_000)
def copied(operand: Strided, shape: tuple[int, ...]) -> bool:
    """Whether a reshape takes a copy."""
    given = torch.empty_strided(operand.shape, operand.stride, dtype=torch_dtype(operand.dtype), device="meta")
    return not (seen := given.reshape(shape))._is_view() and seen is not given


@lru_cache(maxsize=20_000)
def viewed(op: str, args: tuple[Arg, ...], operands: tuple[Strided, ...], count: int) -> list[tuple[Strided, bool]]:
    """Per result of a view: how it lies, and whether it shares the first operand's storage."""
    given = {
        i: torch.empty_strided(t.shape, t.stride, dtype=torch_dtype(t.dtype), device="meta")
        for i, t in enumerate(operands)
    }
    positional, named = call_arguments(op, args, given, META)
    found = []
    for tensor in results(operator_of(op)(*positional, **named), count):
        # an op may return the very tensor it is given
        shares = tensor is not None and (tensor._is_view() or tensor is given[0])
        lies = operands[0] if tensor is None else Strided(
            tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))
        found.append((lies, shares))
    return found
