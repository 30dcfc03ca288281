"""The device mesh: named axes over ranks, outermost (slowest link) first.

Goes in: axis names and sizes. Comes out: coordinates of ranks and the rank groups of an axis.
Ranks are numbered row-major: the last axis is the fastest.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import msgspec

from fxpar.plans.errors import FxparError


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """One mesh axis: a name (``"dp"``, ``"tp"``, or ``"a0"`` when anonymous) and its number of ranks."""

    name: str
    size: int


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """A row-major grid of ranks."""

    axes: tuple[Axis, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return _sizes(self)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of ``rank`` on every axis."""
        coords = []
        for size in reversed(self.sizes):
            rank, c = divmod(rank, size)
            coords.append(c)
        return tuple(reversed(coords))

    def rank(self, coords: tuple[int, ...]) -> int:
        """Inverse of :meth:`coordinates`."""
        rank = 0
        for size, c in zip(self.sizes, coords, strict=True):
            rank = rank * size + c
        return rank

    def group(self, rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only on ``axes``, in row-major order of those axes."""
        coords = list(self.coordinates(rank))
        members = []
        for position in itertools.product(*(range(self.sizes[a]) for a in axes)):
            for axis, c in zip(axes, position, strict=True):
                coords[axis] = c
            members.append(self.rank(tuple(coords)))
        return tuple(members)

    def groups(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axes``, each once, in order of their first rank."""
        return tuple(sorted({self.group(rank, axes) for rank in range(self.world_size)}))

    def __str__(self) -> str:
        return ",".join(f"{a.name}={a.size}" for a in self.axes)


@lru_cache(maxsize=4096)
def _sizes(mesh: Mesh) -> tuple[int, ...]:
    return tuple(axis.size for axis in mesh.axes)


def parse_mesh(text: str) -> Mesh:
    """``"4"``, ``"2x2"`` (anonymous axes) or ``"dp=2,tp=2"`` (named axes) as a mesh.

    Raises:
        FxparError: the text is neither form, a size is not a positive integer, or a name repeats.
    """
    parts = text.replace("x", ",").split(",") if "=" not in text else text.split(",")
    axes = []
    for index, part in enumerate(parts):
        name, _, size = part.rpartition("=")
        if not _is_size(size.strip()) or ("=" in text and not name.strip().isidentifier()):
            raise FxparError(
                f"'{text[:80]}' is not a mesh", numbers=f"cannot read '{part[:40]}'",
                way_out="write 4, 2x2 or dp=2,tp=2",
            )
        axes.append(Axis(name.strip() or f"a{index}", int(size)))
    if len({a.name for a in axes}) < len(axes):
        raise FxparError(f"mesh '{text}' names an axis twice", way_out="give every axis its own name")
    return Mesh(tuple(axes))


def _is_size(text: str) -> bool:
    # isdecimal, for isdigit also takes what int() does not read; 7 digits are more ranks than a plan may have
    return text.isdecimal() and len(text) <= 7 and int(text) > 0
