"""What a microbatch has of something along the batch: of dims, of an op's geometry, and how parts are joined again."""

from __future__ import annotations

import math

from fxpar.plans.layout import Dims, Partial, Placement, Shard
from fxpar.plans.program import Arg, Join


def moving_geometry(geometry: Arg) -> Arg | None:
    """The geometry of the first microbatch with the elements by which the next one moves on."""
    assert isinstance(geometry, tuple)
    triples = [tuple(geometry[i : i + 3]) for i in range(0, len(geometry), 3)]
    cut = [i for i, (size, _, length) in enumerate(triples) if size != length]
    if len(cut) != 1:
        return None
    stride = math.prod(int(size) for size, _, _ in triples[cut[0] + 1 :]) * int(triples[cut[0]][2])  # type: ignore
    return (*geometry, stride)


def cut_dims(dims: Dims, placement: Placement, count: int) -> Dims:
    """Logical dims of a microbatch's part; a logical dim of which one element is left goes."""
    if not isinstance(placement, Shard):
        return dims
    row = list(dims[placement.dim])
    row[placement.first] //= count
    return tuple(tuple(a for a in row if a != 1) if d == placement.dim else atoms for d, atoms in enumerate(dims))


def join_of(placement: Placement) -> Join:
    """How microbatches join what one leaves in ``placement``."""
    if isinstance(placement, Shard):
        return placement.dim
    return "sum" if isinstance(placement, Partial) else "same"
