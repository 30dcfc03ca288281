"""Embedding of a table of which a rank holds some rows: ids of other rows give zeros.

``rows`` are flat (size, start, length) triples, the mixed-radix digits of the row number: the rank holds the rows
whose every digit lies in ``[start, start + length)``, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def local_rows(ids: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    """(local row of every id, whether it is held here); the row of an id that is not held is meaningless."""
    held = torch.ones_like(ids, dtype=torch.bool)
    local = torch.zeros_like(ids)
    rest, stride = ids, 1
    for size, start, length in reversed([tuple(rows[i : i + 3]) for i in range(0, len(rows), 3)]):
        digit = rest.remainder(size) - start
        held = held & (digit >= 0) & (digit < length)
        local = local + digit * stride
        rest = rest.div(size, rounding_mode="floor")
        stride *= length
    return local, held & (ids >= 0)


@torch.library.custom_op("fxpar::embedding_block", mutates_args=())
def embedding_block(weight: Tensor, indices: Tensor, rows: list[int]) -> Tensor:
    """Rows of ``weight`` ([held rows, d]) for ``indices`` (global, any shape): [..., d], zeros where not held."""
    if weight.shape[0] == 0:
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    local, held = local_rows(indices, rows)
    picked = torch.nn.functional.embedding(torch.where(held, local, 0), weight)
    return picked.masked_fill(~held.unsqueeze(-1), 0)


@embedding_block.register_fake
def _(weight: Tensor, indices: Tensor, rows: list[int]) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


@torch.library.custom_op("fxpar::embedding_block_backward", mutates_args=())
def embedding_block_backward(grad_output: Tensor, indices: Tensor, rows: list[int], padding_idx: int) -> Tensor:
    """Gradient of the held rows ([held rows, d]); ids equal to ``padding_idx`` (global) add nothing."""
    local, held = local_rows(indices, rows)
    count = 1
    for length in rows[2::3]:
        count *= length
    # ids that add nothing go to one row more, which is dropped
    target = torch.where(held & (indices != padding_idx), local, count)
    gradient = grad_output.new_zeros((count + 1, grad_output.shape[-1]))
    gradient.index_add_(0, target.reshape(-1), grad_output.reshape(-1, grad_output.shape[-1]))
    return gradient[:count].clone()


@embedding_block_backward.register_fake
def _(grad_output: Tensor, indices: Tensor, rows: list[int], padding_idx: int) -> Tensor:
    count = 1
    for length in rows[2::3]:
        count *= length
    return grad_output.new_empty((count, grad_output.shape[-1]))
