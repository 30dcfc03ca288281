"""Layouts inside the graph: where each mesh axis puts a tensor, in terms of logical dims.

A tensor dim is cut into *atoms* (logical dims, major first): ``[b*s, d]`` has dims ``((b, s), (d,))``. A dim of
size 1 has no atoms. A layout holds one placement per mesh axis; a ``Shard`` names a run of adjacent atoms of one dim
by position, so splitting the minor atom of a compound dim is legal and the local tensor is the flattened local block.

Shards follow ``torch.chunk``: a run of n elements over k ranks gives rank i the elements
``[i*c, min((i+1)*c, n))`` with ``c = ceil(n/k)``; trailing ranks may be empty. When several axes shard the same run
they nest, the outer (earlier) axis first.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, TypeAlias

import msgspec

from fxpar.plans.mesh import Mesh

Dims: TypeAlias = tuple[tuple[int, ...], ...]
"""Atoms of every tensor dim, major first; a dim of size 1 is ``()``."""


class Replicate(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    """Every rank of the axis holds the same value."""

    def __str__(self) -> str:
        return "R"


class Partial(msgspec.Struct, frozen=True, array_like=True, tag="P"):
    """The value is the reduction of the ranks' tensors."""

    reduce: Literal["sum", "max", "min"] = "sum"

    def __str__(self) -> str:
        return f"P({self.reduce})"


class Shard(msgspec.Struct, frozen=True, array_like=True, tag="S"):
    """The axis cuts the run of atoms ``first .. first + length - 1`` of tensor dim ``dim``."""

    dim: int
    first: int = 0
    length: int = 1

    def __str__(self) -> str:
        inner = "" if (self.first, self.length) == (0, 1) else f".{self.first}+{self.length}"
        return f"S({self.dim}{inner})"

    def overlaps(self, other: Shard) -> bool:
        """True when both cut at least one atom in common."""
        return (
            self.dim == other.dim
            and self.first < other.first + other.length
            and other.first < self.first + self.length
        )


Placement: TypeAlias = Replicate | Partial | Shard
Layout: TypeAlias = tuple[Placement, ...]

REPLICATE = Replicate()
PARTIAL_SUM = Partial("sum")


class Digit(msgspec.Struct, frozen=True):
    """One mixed-radix digit of a tensor dim on one rank: ``size`` elements globally, ``[start, start+length)`` here."""

    size: int
    start: int
    length: int


def layout_text(layout: Layout) -> str:
    """``"[R, S(0), P(sum)]"``."""
    return "[" + ", ".join(map(str, layout)) + "]"


def replicated(mesh: Mesh) -> Layout:
    return (REPLICATE,) * len(mesh.axes)


def valid_layout(layout: Layout, dims: Dims) -> bool:
    """True when every shard names existing atoms and no two axes cut overlapping, unequal runs."""
    shards = [p for p in layout if isinstance(p, Shard)]
    for index, s in enumerate(shards):
        if not 0 <= s.dim < len(dims) or s.length < 1 or s.first < 0 or s.first + s.length > len(dims[s.dim]):
            return False
        if any(s.overlaps(other) and s != other for other in shards[:index]):
            return False
    return True


def chunk(start: int, length: int, parts: int, index: int) -> tuple[int, int]:
    """The ``index``-th of ``parts`` chunks of ``[start, start+length)`` as (start, length), torch.chunk's sizes."""
    step = -(-length // parts)
    low = min(index * step, length)
    return start + low, min(step, length - low)


def runs_of(layout: Layout, dim: int, atoms: int) -> list[tuple[int, int]]:
    """Dim ``dim`` (of ``atoms`` atoms) as consecutive (first, length) runs: sharded runs whole, other atoms single."""
    cut = {p.first: p.length for p in layout if isinstance(p, Shard) and p.dim == dim}
    runs, position = [], 0
    while position < atoms:
        length = cut.get(position, 1)
        runs.append((position, length))
        position += length
    return runs


def digits(dims: Dims, layout: Layout, mesh: Mesh, coords: tuple[int, ...]) -> tuple[tuple[Digit, ...], ...]:
    """Per tensor dim, the digits (one per run) that describe the block of the rank at ``coords``."""
    result = []
    for dim, atoms in enumerate(dims):
        row = []
        for first, length in runs_of(layout, dim, len(atoms)):
            size = math.prod(atoms[first : first + length])
            start, local = 0, size
            for placement, axis_size, coord in zip(layout, mesh.sizes, coords, strict=True):
                if isinstance(placement, Shard) and placement.dim == dim and placement.first == first:
                    start, local = chunk(start, local, axis_size, coord)
            row.append(Digit(size, start, local))
        result.append(tuple(row))
    return tuple(result)


def local_shape(dims: Dims, layout: Layout, mesh: Mesh, coords: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the local tensor at ``coords``."""
    return tuple(math.prod(d.length for d in row) for row in digits(dims, layout, mesh, coords))


@lru_cache(maxsize=200_000)
def largest_shape(dims: Dims, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Local shape at coordinate 0 of every axis: with torch.chunk's sizes no rank holds more."""
    return local_shape(dims, layout, mesh, (0,) * len(mesh.axes))


@lru_cache(maxsize=1_000_000)
def largest_size(dims: Dims, layout: Layout, mesh: Mesh) -> int:
    """Elements of the largest local tensor."""
    parts: dict[Shard, list[int]] = {}
    size = math.prod(a for atoms in dims for a in atoms)
    for placement, ranks in zip(layout, mesh.sizes, strict=True):
        if isinstance(placement, Shard):
            parts.setdefault(placement, []).append(ranks)
    for shard, cuts in parts.items():
        run = local = math.prod(dims[shard.dim][shard.first : shard.first + shard.length])
        for n in cuts:
            local = -(-local // n)
        size = size // run * local if run else 0
    return size


def global_shape(dims: Dims) -> tuple[int, ...]:
    return tuple(math.prod(atoms) for atoms in dims)


def whole_dims(shape: tuple[int, ...]) -> Dims:
    """Every dim one atom (none for size 1): the coarsest dims of a shape."""
    return tuple(() if size == 1 else (size,) for size in shape)
