"""Parts of argmax, max along a dim and cumsum that one rank computes when the dim is cut over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.rules.ops.random import LIBRARY
from fxpar.rules.ops.stateless import linear_index

LIBRARY.define("extreme_place(Tensor x, int? dim, bool largest, int[] digits, int count) -> (Tensor, Tensor)")
LIBRARY.define("place_if_best(Tensor value, Tensor place, Tensor best, int count) -> Tensor")
LIBRARY.define("cumsum_after(Tensor x, Tensor totals, int dim, int before, ScalarType dtype) -> Tensor")


def worst(dtype: torch.dtype, largest: bool) -> float | int | bool:
    """The value that no other loses against."""
    if dtype == torch.bool:
        return not largest
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def extreme_place(
    x: Tensor, dim: int | None, largest: bool, digits: Sequence[int], count: int
) -> tuple[Tensor, Tensor]:
    """(largest or smallest value, its first place in the whole), with size 1 in ``dim`` (None: in all dims).

    ``digits``: (size, start, length) triples of the cut dim, or of all dims; ``count``: the place in an empty piece.
    """
    shape = [1] * x.dim() if dim is None else [*x.shape[:dim], 1, *x.shape[dim + 1 :]]
    row, along = (x.reshape(-1), 0) if dim is None else (x, dim)
    if row.shape[along] == 0:
        return x.new_full(shape, worst(x.dtype, largest)), x.new_full(shape, count, dtype=torch.int64)
    value, place = row.max(along, keepdim=True) if largest else row.min(along, keepdim=True)
    places = linear_index(digits, x.device) if digits else torch.arange(row.shape[along], device=x.device)
    return value.reshape(shape), places[place].reshape(shape)


def place_if_best(value: Tensor, place: Tensor, best: Tensor, count: int) -> Tensor:
    """The place where this rank's value is the best of all, else ``count``."""
    mine = value == best
    if value.is_floating_point():
        mine = mine | (value.isnan() & best.isnan())
    return torch.where(mine, place, count)


def cumsum_after(x: Tensor, totals: Tensor, dim: int, before: int, dtype: torch.dtype) -> Tensor:
    """Running sums along ``dim`` that start from the first ``before`` of the pieces' ``totals``."""
    return x.cumsum(dim, dtype=dtype) + totals.narrow(dim, 0, before).sum(dim, keepdim=True, dtype=dtype)


for _name, _function in (
    ("extreme_place", extreme_place), ("place_if_best", place_if_best), ("cumsum_after", cumsum_after),
):  # fmt: skip
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
