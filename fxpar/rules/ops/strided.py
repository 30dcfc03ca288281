"""``fxpar::as_strided`` and ``fxpar::as_strided_scatter``: torch's, of an operand laid out contiguously.

Strides say where elements lie in memory, and a rewritten program keeps values, not memory: whatever strides the
operand has when it arrives, these read it in row-major order, as it lay when the program was captured.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxpar.rules.ops.random import LIBRARY

LIBRARY.define("as_strided(Tensor self, int[] size, int[] stride, int storage_offset) -> Tensor")
LIBRARY.define("as_strided_scatter(Tensor self, Tensor src, int[] size, int[] stride, int storage_offset) -> Tensor")


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int) -> Tensor:
    """The elements of ``x``, numbered row-major from 0, at ``offset + sum index * stride``, copied."""
    return x.contiguous().as_strided(size, stride, storage_offset).clone()


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int
) -> Tensor:
    """``x`` with those elements replaced by ``src``."""
    return x.contiguous().as_strided_scatter(src, size, stride, storage_offset)


LIBRARY.impl("as_strided", as_strided, "CompositeExplicitAutograd")
LIBRARY.impl("as_strided_scatter", as_strided_scatter, "CompositeExplicitAutograd")
