"""``gather`` from a tensor of which a rank holds part of the gathered dim: places of other ranks give zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.rules.ops.embedding_block import local_rows


@torch.library.custom_op("fxpar::gather_block", mutates_args=())
def gather_block(source: Tensor, dim: int, index: Tensor, rows: list[int]) -> Tensor:
    """``source.gather(dim, index)`` with global places in ``index``; ``rows`` as in ``fxpar::embedding_block``."""
    if source.shape[dim] == 0:
        return source.new_zeros(index.shape)
    local, held = local_rows(index, rows)
    return source.gather(dim, torch.where(held, local, 0)).masked_fill(~held, 0)


@gather_block.register_fake
def _(source: Tensor, dim: int, index: Tensor, rows: list[int]) -> Tensor:
    return source.new_empty(index.shape)
