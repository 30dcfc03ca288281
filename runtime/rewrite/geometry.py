"""Where a reshard step cuts a local tensor: regions, lengths per peer, positions.

Goes in: one :class:`~fxpar.plans.reshard.Step`, logical dims, the mesh and a rank's coordinates. Comes out: the
:class:`~fxpar.runtime.local.Cut` or :class:`~fxpar.runtime.local.Swap` that the runtime's collectives work with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fxpar.plans.layout import Digit, Dims, Layout, Shard, digits, runs_of
from fxpar.plans.mesh import Mesh
from fxpar.plans.reshard import Step
from fxpar.rules.expansion import Exchange
from fxpar.runtime.local import Cut, Geometry, Halo, Swap


@dataclass(frozen=True)
class Region:
    """A run of atoms inside a local tensor: elements before, in and after it; ``start`` is its global position."""

    outer: int
    size: int
    inner: int
    start: int


def region(dims: Dims, layout: Layout, mesh: Mesh, coords: tuple[int, ...], run: Shard) -> Region:
    """The region of ``run`` in the local tensor of ``layout``; the run is one digit of it or several whole atoms."""
    before: list[int] = []
    inside: list[Digit] = []
    after: list[int] = []
    for dim, (atoms, row) in enumerate(zip(dims, digits(dims, layout, mesh, coords), strict=True)):
        for (first, length), digit in zip(runs_of(layout, dim, len(atoms)), row, strict=True):
            if dim == run.dim and first >= run.first and first + length <= run.first + run.length:
                inside.append(digit)
            elif (dim, first) < (run.dim, run.first):
                before.append(digit.length)
            else:
                after.append(digit.length)
    start = inside[0].start if len(inside) == 1 else 0
    return Region(prod(before), prod(d.length for d in inside), prod(after), start)


def peer_lengths(
    dims: Dims, layout: Layout, mesh: Mesh, coords: tuple[int, ...], axis: int, run: Shard
) -> tuple[int, ...]:
    """Local length of ``run`` on every coordinate of ``axis``, the other coordinates being this rank's."""
    return tuple(
        region(dims, layout, mesh, (*coords[:axis], i, *coords[axis + 1 :]), run).size for i in range(mesh.sizes[axis])
    )


@lru_cache(maxsize=50_000)
def gather_cut(step: Step, dims: Dims, mesh: Mesh, coords: tuple[int, ...]) -> Cut:
    """The cut that an all-gather joins."""
    run = step.before[step.axis]
    assert isinstance(run, Shard)
    here = region(dims, step.before, mesh, coords, run)
    return Cut(here.outer, peer_lengths(dims, step.before, mesh, coords, step.axis, run), here.inner)


@lru_cache(maxsize=50_000)
def scatter_cut(step: Step, dims: Dims, mesh: Mesh, coords: tuple[int, ...]) -> Cut:
    """The cut that a reduce-scatter or a slice makes."""
    run = step.after[step.axis]
    assert isinstance(run, Shard)
    here = region(dims, step.after, mesh, coords, run)
    return Cut(here.outer, peer_lengths(dims, step.after, mesh, coords, step.axis, run), here.inner)


@lru_cache(maxsize=50_000)
def all_to_all_swap(step: Step, dims: Dims, mesh: Mesh, coords: tuple[int, ...]) -> Swap:
    """The exchange of an all-to-all between two runs that do not overlap."""
    joined, cut = step.before[step.axis], step.after[step.axis]
    assert isinstance(joined, Shard) and isinstance(cut, Shard)
    joined_first = (joined.dim, joined.first) < (cut.dim, cut.first)
    first, second = (joined, cut) if joined_first else (cut, joined)
    a = region(dims, step.before, mesh, coords, first)
    b = region(dims, step.before, mesh, coords, second)
    # total = outer * a * middle * b * inner and b.outer = outer * a * middle; count digits, not quotients: 0 / 0
    return Swap(
        a.outer,
        _between(dims, step.before, mesh, coords, first, second),
        b.inner,
        peer_lengths(dims, step.before, mesh, coords, step.axis, joined),
        peer_lengths(dims, step.after, mesh, coords, step.axis, cut),
        joined_first,
    )


def _between(dims: Dims, layout: Layout, mesh: Mesh, coords: tuple[int, ...], first: Shard, second: Shard) -> int:
    count = 1
    for dim, (atoms, row) in enumerate(zip(dims, digits(dims, layout, mesh, coords), strict=True)):
        for (start, _), digit in zip(runs_of(layout, dim, len(atoms)), row, strict=True):
            if (first.dim, first.first + first.length - 1) < (dim, start) < (second.dim, second.first):
                count *= digit.length
    return count


def exchange_geometry(exchange: Exchange, shape: tuple[int, ...]) -> tuple[Geometry, ...]:
    """The geometries of an expansion's collective on a local tensor of ``shape``."""
    outer, inner = prod(shape[: exchange.dim]), prod(shape[exchange.dim + 1 :])
    if exchange.kind == "all_reduce":
        return ()
    if exchange.kind == "all_gather":
        return (Cut(outer, exchange.lengths, inner),)
    return (Halo(outer, exchange.lengths, inner, exchange.starts, exchange.ends, exchange.fill),)
