"""``fxpar::dropout``, ``fxpar::uniform`` and ``fxpar::normal``: random ops without a generator's state.

``seed`` is an int64 scalar, new each step; ``op_id`` is unique in its program; ``geometry`` says which elements of
the global tensor the local one holds (:mod:`fxpar.rules.ops.stateless`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.rules.ops.stateless import keep_mask, random_bits, uniform

LIBRARY = torch.library.Library("fxpar", "FRAGMENT")
LIBRARY.define("dropout(Tensor x, Tensor seed, float p, int op_id, int[] geometry) -> (Tensor, Tensor)")
LIBRARY.define("uniform(Tensor x, Tensor seed, int op_id, int[] geometry) -> Tensor")
LIBRARY.define("normal(Tensor x, Tensor seed, int op_id, int[] geometry) -> Tensor")


def dropout(x: Tensor, seed: Tensor, p: float, op_id: int, geometry: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(x with a fraction ``p`` of the elements zeroed and the rest divided by 1 - p, bool mask of those kept)."""
    mask = keep_mask(seed, op_id, p, geometry, x.shape, x.device)
    if p >= 1.0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format), mask
    return (x * mask).mul_(1.0 / (1.0 - p)), mask


def uniform_like(x: Tensor, seed: Tensor, op_id: int, geometry: Sequence[int]) -> Tensor:
    """Uniform draws in [0, 1) in the shape and dtype of ``x``, whose values do not matter."""
    if x.dtype == torch.float64:
        return uniform(seed, op_id, geometry, x.shape, x.device)
    # As many bits as the significand holds: rounding a longer fraction could give 1.0.
    bits = random_bits(seed, op_id, geometry, x.shape, x.device)
    digits = 1 - round(math.log2(torch.finfo(x.dtype).eps))
    return bits.bitwise_right_shift_(53 - digits).to(torch.float64).mul_(2.0**-digits).to(x.dtype)


def normal_like(x: Tensor, seed: Tensor, op_id: int, geometry: Sequence[int]) -> Tensor:
    """Standard normal draws in the shape and dtype of ``x``: the inverse distribution function of a uniform draw."""
    centred = uniform(seed, op_id, geometry, x.shape, x.device).mul_(2.0).sub_(1.0 - 2.0**-53)
    return torch.erfinv(centred).mul_(math.sqrt(2.0)).to(x.dtype)


def _dropout_shape(x: Tensor, seed: Tensor, p: float, op_id: int, geometry: Sequence[int]) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


def _shape_of(x: Tensor, seed: Tensor, op_id: int, geometry: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape)


for _name, _kernel, _shape in (
    ("dropout", dropout, _dropout_shape),
    ("uniform", uniform_like, _shape_of),
    ("normal", normal_like, _shape_of),
):
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _key)
    torch.library.register_fake(f"fxpar::{_name}", _shape, lib=LIBRARY)
