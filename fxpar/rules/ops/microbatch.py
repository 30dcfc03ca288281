"""``fxpar::microbatch``: one microbatch's part of a value that was made of the whole batch.

``number`` is an int64 scalar, the microbatch; ``x`` is cut along ``dim`` into ``count`` equal parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.rules.ops.random import LIBRARY

MICROBATCH = "fxpar.microbatch.default"
"""The op's name in a program."""

LIBRARY.define("microbatch(Tensor x, Tensor number, int dim, int count) -> Tensor")


def microbatch(x: Tensor, number: Tensor, dim: int, count: int) -> Tensor:
    """Part ``number`` of ``x``, in memory of its own. The number stays on its device: nothing waits for it."""
    length = x.shape[dim] // count
    places = torch.arange(length, device=x.device) + number.to(x.device) * length
    return x.index_select(dim, places)


def _shape(x: Tensor, number: Tensor, dim: int, count: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], x.shape[dim] // count, *x.shape[dim + 1 :]))


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("microbatch", microbatch, _key)
torch.library.register_fake("fxpar::microbatch", _shape, lib=LIBRARY)
