"""Stored layouts as torch placements: where the plan's world meets ``torch.distributed.tensor``.

``Shard(d)`` of torch cuts the whole tensor dim; a run of atoms behind others is torch's strided shard, whose
``split_factor`` is the number of outer blocks. Both nest left to right like the plan's layouts.
"""

from __future__ import annotations

from math import prod

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fxpar.plans import layout as plan_layout
from fxpar.plans.layout import Dims, Layout, runs_of
from fxpar.plans.mesh import Mesh


def torch_placements(layout: Layout, dims: Dims, mesh: Mesh) -> tuple[Placement, ...] | None:
    """Placements under which torch cuts a tensor into the very same local tensors, None when there are none.

    Not expressible: pending values; an uneven cut of a run that is not its whole tensor dim; a further cut of a dim
    that has a strided one (torch undoes such a pair in another order).
    """
    result: list[Placement] = []
    # per dim, the lengths left of every run
    lengths = [
        {first: prod(atoms[first : first + n]) for first, n in runs_of(layout, dim, len(atoms))}
        for dim, atoms in enumerate(dims)
    ]
    strided: set[int] = set()
    for placement, ranks in zip(layout, mesh.sizes, strict=True):
        match placement:
            case plan_layout.Replicate():
                result.append(Replicate())
            case plan_layout.Shard(dim, first):
                runs = lengths[dim]
                outer = prod(n for start, n in runs.items() if start < first)
                if dim in strided or (len(runs) > 1 and runs[first] % ranks):
                    return None
                if outer == 1:
                    result.append(Shard(dim))
                else:
                    strided.add(dim)
                    result.append(_StridedShard(dim, split_factor=outer))
                runs[first] = -(-runs[first] // ranks)
            case _:
                return None
    return tuple(result)
