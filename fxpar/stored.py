"""In which layouts a program input may be stored between steps.

Parameters become DTensors, so only layouts that torch's placements can say are offered; batch inputs may be cut along
any logical dim (every rank slices its own part); everything else is replicated.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from fxpar.plans.layout import REPLICATE, Dims, Layout, Placement, Shard, replicated, valid_layout
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Input
from fxpar.runtime.surface import torch_placements


def stored_layouts(item: Input, dims: Dims, mesh: Mesh) -> tuple[Layout, ...]:
    """Candidate layouts of an input, replicated first."""
    if item.kind == "parameter":
        return _parameter_layouts(dims, mesh)
    if item.kind == "input":
        return _shards(dims, mesh)
    return (replicated(mesh),)


@lru_cache(maxsize=20_000)
def _shards(dims: Dims, mesh: Mesh) -> tuple[Layout, ...]:
    options: list[Placement] = [REPLICATE]
    for dim, atoms in enumerate(dims):
        if len(atoms) > 1:
            options.append(Shard(dim, 0, len(atoms)))
        options += [Shard(dim, a) for a in range(len(atoms))]
    layouts = itertools.product(options, repeat=len(mesh.axes))
    return tuple(lay for lay in layouts if valid_layout(lay, dims))


@lru_cache(maxsize=20_000)
def _parameter_layouts(dims: Dims, mesh: Mesh) -> tuple[Layout, ...]:
    return tuple(lay for lay in _shards(dims, mesh) if torch_placements(lay, dims, mesh) is not None)
