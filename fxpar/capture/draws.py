"""Random ops of torch as our stateless ones, replaced while tracing.

Every draw gets a placeholder seed and op id here; numbering the program's draws fills in the real ones
(:mod:`fxpar.capture.numbering`). A draw from the user's own generator is left as it is, and refused when lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.capture.decompositions import decomposes
from fxpar.rules.ops.stateless import whole_geometry

aten = torch.ops.aten


def placeholder_seed(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def uniform(x: Tensor) -> Tensor:
    """Draws in [0, 1) like ``x``."""
    return torch.ops.fxpar.uniform(x, placeholder_seed(x.device), 0, whole_geometry(x.shape))


def normal(x: Tensor) -> Tensor:
    """Standard normal draws like ``x``."""
    return torch.ops.fxpar.normal(x, placeholder_seed(x.device), 0, whole_geometry(x.shape))


def like(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.zeros(x.shape, dtype=dtype or x.dtype, device=x.device)


def blank(size: Sequence[int], dtype: torch.dtype | None, device: torch.device | None) -> Tensor:
    return torch.zeros(list(size), dtype=dtype or torch.get_default_dtype(), device=device)


@decomposes(aten.native_dropout.default)
def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if train is False or p == 0.0:
        return x, torch.ones(x.shape, dtype=torch.bool, device=x.device)
    return torch.ops.fxpar.dropout(x, placeholder_seed(x.device), p, 0, whole_geometry(x.shape))


@decomposes(aten.bernoulli.p)
def bernoulli_p(x: Tensor, p: float, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return (uniform(like(x, torch.float32)) < p).to(x.dtype)


@decomposes(aten.bernoulli.default)
def bernoulli(x: Tensor, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return (uniform(x) < x).to(x.dtype)


@decomposes(aten.rand_like.default)
def rand_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return uniform(like(x, dtype))


@decomposes(aten.randn_like.default)
def randn_like(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return normal(like(x, dtype))


@decomposes(aten.rand.default)
def rand(
    size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    return uniform(blank(size, dtype, device))


@decomposes(aten.randn.default)
def randn(
    size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    return normal(blank(size, dtype, device))


@decomposes(aten.uniform.default)
def uniform_from(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return uniform(x) * (high - low) + low


@decomposes(aten.normal_functional.default)
def normal_functional(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return NotImplemented
    return normal(x) * std + mean


def integers(x: Tensor, low: int, high: int) -> Tensor:
    """Draws in [low, high) in the shape and dtype of ``x``."""
    return (uniform(like(x, torch.float64)) * (high - low) + low).floor().to(x.dtype)


@decomposes(aten.randint.default)
def randint(
    high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    return integers(blank(size, dtype or torch.int64, device), 0, high)


@decomposes(aten.randint.low)
def randint_low(
    low: int,
    high: int,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    return integers(blank(size, dtype or torch.int64, device), low, high)


@decomposes(aten.randint_like.default)
def randint_like(x: Tensor, high: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return integers(like(x, dtype), 0, high)


@decomposes(aten.randint_like.low_dtype)
def randint_like_low(x: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return integers(like(x, dtype), low, high)
