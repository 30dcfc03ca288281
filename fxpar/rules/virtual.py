"""Tensors of all ranks of a mesh in one process: a global tensor to pieces and back, by index.

Written for judging rules, apart from the runtime's own scatter: positions come from the digits one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fxpar.plans.layout import Digit, Dims, Layout, Partial, Replicate, Shard, digits, global_shape
from fxpar.plans.mesh import Mesh


@lru_cache(maxsize=4096)
def row_positions(row: tuple[Digit, ...]) -> Tensor:
    """Global positions, in local order, of the elements of a tensor dim that a rank with these digits holds."""
    positions = torch.zeros(1, dtype=torch.int64)
    for digit in row:
        inner = torch.arange(digit.start, digit.start + digit.length)
        positions = (positions[:, None] * digit.size + inner).reshape(-1)
    return positions


@lru_cache(maxsize=4096)
def positions(dims: Dims, layout: Layout, mesh: Mesh, coords: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Per tensor dim, the global positions that the rank at ``coords`` holds."""
    return tuple(row_positions(row) for row in digits(dims, layout, mesh, coords))


def summands(tensor: Tensor, parts: int, rng: torch.Generator) -> list[Tensor]:
    """``parts`` tensors that add up to ``tensor``: random multiples of 1/64, exactly when the values are such too, or
    all of it on one part and zeros on the others; multiples of the tensor in dtypes of few bits."""
    if tensor.numel() and torch.rand((), generator=rng) < 0.75:
        if tensor.dtype in (torch.bfloat16, torch.float16):
            return multiples(tensor, parts, rng)
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # a rounded normal draw; few bits, so that sums of several stay exact
        drawn = [
            (torch.randn(real.shape, generator=rng, dtype=torch.float64) * 96).round().div(64).to(real.dtype)
            for _ in range(parts - 1)
        ]
        last = real.clone()
        for part in drawn:
            last = last - part
        row = [*drawn, last]
        return [torch.view_as_complex(p.contiguous()) if tensor.is_complex() else p for p in row]
    holder = int(torch.randint(parts, (), generator=rng))
    return [tensor if i == holder else torch.zeros_like(tensor) for i in range(parts)]


def multiples(tensor: Tensor, parts: int, rng: torch.Generator) -> list[Tensor]:
    """``parts`` multiples of a tensor that add up to it: in a narrow dtype, summands of any other size would round more
    than the tensor holds."""
    shares = [torch.randint(-2, 3, tensor.shape, generator=rng) / 2 + 1 / 4 for _ in range(parts - 1)]
    last = torch.ones(tensor.shape)
    for share in shares:
        last = last - share
    return [(tensor * share).to(tensor.dtype) for share in (*shares, last)]


def scatter(tensor: Tensor, dims: Dims, layout: Layout, mesh: Mesh, rng: torch.Generator) -> list[Tensor]:
    """The pieces of all ranks, in rank order. A pending sum becomes random summands; a pending maximum (minimum) the
    value on one rank of the axis and no more (no less) on the others."""
    shares: dict[tuple[int, ...], Tensor] = {(): tensor}
    for placement, size in zip(layout, mesh.sizes, strict=True):
        grown: dict[tuple[int, ...], Tensor] = {}
        for coords, share in shares.items():
            if not isinstance(placement, Partial):
                row = [share] * size
            elif placement.reduce == "sum":
                row = summands(share, size, rng)
            else:
                holder = int(torch.randint(size, (), generator=rng))
                sign = -1 if placement.reduce == "max" else 1
                row = [
                    share
                    if i == holder
                    else share + sign * torch.randint(3, share.shape, generator=rng).to(share.dtype)
                    for i in range(size)
                ]
            grown.update({(*coords, i): part for i, part in enumerate(row)})
        shares = grown
    cut = {p.dim for p in layout if isinstance(p, Shard)}
    pieces = []
    for rank in range(mesh.world_size):
        piece = shares[mesh.coordinates(rank)]
        held = positions(dims, layout, mesh, mesh.coordinates(rank)) if cut else ()
        for dim in cut:
            piece = piece.index_select(dim, held[dim])
        pieces.append(piece)
    return pieces


class Disagreement(Exception):
    """Ranks that should hold the same piece do not."""


def assemble(
    pieces: Sequence[Tensor], dims: Dims, layout: Layout, mesh: Mesh, *, tolerance: float = 1e-9, least: float = 0.0
) -> Tensor:
    """The global tensor: blocks placed, pending values reduced over their axes.

    Raises:
        Disagreement: replicas differ by more than ``tolerance`` (as in :func:`close`).
        ValueError: a piece has not the shape of its block, or some element is held by no rank.
    """
    shape = global_shape(dims)
    ranges = [range(n) if not isinstance(p, Replicate) else range(1) for p, n in zip(layout, mesh.sizes, strict=True)]
    first: Tensor | None = None
    ranks: list[int] = []
    replicas = [range(n) if isinstance(p, Replicate) else range(1) for p, n in zip(layout, mesh.sizes, strict=True)]
    for copy in itertools.product(*replicas):
        now = [mesh.rank(at) for at in holders(layout, ranges, copy)]
        if first is not None and all(map(torch.equal, (pieces[r] for r in now), (pieces[r] for r in ranks))):
            continue
        whole = _reduced(pieces, dims, layout, mesh, shape, ranges, copy)
        if first is None:
            first, ranks = whole, now
        elif not close(whole, first, tolerance, least=least):
            raise Disagreement(f"replicas {copy} and {(0,) * len(copy)} differ")
    if first is None:
        raise ValueError("a mesh without ranks")
    return first


def holders(layout: Layout, ranges: list[range], copy: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Coordinates of the ranks that together hold one copy of the tensor."""
    return [
        tuple(same if isinstance(p, Replicate) else c for p, c, same in zip(layout, coords, copy, strict=True))
        for coords in itertools.product(*ranges)
    ]


def _reduced(
    pieces: Sequence[Tensor],
    dims: Dims,
    layout: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    ranges: list[range],
    copy: tuple[int, ...],
) -> Tensor:
    """The global tensor as the replicas with coordinates ``copy`` (on the replicated axes) hold it."""
    waiting = [i for i, p in enumerate(layout) if isinstance(p, Partial)]
    cut = any(isinstance(p, Shard) for p in layout)
    kinds = {p.reduce for p in layout if isinstance(p, Partial)}
    if len(kinds) > 1:
        raise ValueError(f"a value cannot be pending in {sorted(kinds)} at once")
    shares: dict[tuple[int, ...], Tensor] = {}
    filled: dict[tuple[int, ...], Tensor] = {}
    for at in holders(layout, ranges, copy):
        piece = pieces[mesh.rank(at)]
        held = positions(dims, layout, mesh, at) if cut else ()
        expected = tuple(len(h) for h in held) if cut else shape
        if tuple(piece.shape) != expected:
            raise ValueError(f"the rank at {at} has shape {tuple(piece.shape)}, its block {expected}")
        key = tuple(at[i] for i in waiting)
        if not cut:
            shares[key] = piece
            continue
        share = shares.setdefault(key, torch.zeros(shape, dtype=piece.dtype))
        mark = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
        if held:
            places = torch.meshgrid(*held, indexing="ij")
            share[places] = piece
            mark[places] = True
        else:
            share.copy_(piece)
            mark.fill_(True)
    if not all(bool(mark.all()) for mark in filled.values()):
        raise ValueError("some elements are held by no rank")
    total: Tensor | None = None
    for share in shares.values():
        if total is None:
            total = share
        elif kinds == {"sum"}:
            total = total + share
        else:
            total = torch.maximum(total, share) if kinds == {"max"} else torch.minimum(total, share)
    if total is None:
        raise ValueError("a mesh without ranks")
    return total


def close(a: Tensor, b: Tensor, tolerance: float, *, least: float = 0.0) -> bool:
    """Equal in shape, dtype, and values to ``tolerance`` of the largest finite value, or of ``least`` if that is more
    (exact for integers)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    finite = b[b.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(size, least, 1e-3), equal_nan=True)
