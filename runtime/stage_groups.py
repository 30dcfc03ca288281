"""Process groups of a plan with stages: those inside this rank's stages, and the pipeline's own.

The mesh inside is the plan's with one rank on the pipeline's axis, so that layouts and coordinates keep their length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist

from fxpar.plans.mesh import Mesh
from fxpar.runtime.groups import MeshGroups, connect, device_mesh_of

ALONE = "one"
"""Name of the torch mesh's axis of one rank that stands for the pipeline's among DTensors' axes."""


@dataclass(frozen=True)
class StageGroups:
    """Attributes:
    whole: the whole mesh.
    inside: the mesh that this rank's stages run on; ``everyone`` is still the group of all ranks.
    pipeline: the group along the pipeline's axis, in order of its coordinates.
    place: this rank's coordinate on it.
    """

    whole: MeshGroups
    inside: MeshGroups
    pipeline: dist.ProcessGroup
    place: int

    def rank_at(self, place: int) -> int:
        """The process at a coordinate of the pipeline's axis, as torch numbers processes."""
        return dist.get_global_rank(self.pipeline, place)


def connect_stages(mesh: Mesh, axis: int, inner: Mesh, group: dist.ProcessGroup | None) -> StageGroups:
    """Groups of ``mesh``, whose axis ``axis`` is that of the stages; ``inner`` is the mesh of one stage.

    Raises:
        FxparError: as :func:`fxpar.runtime.groups.connect`.
    """
    whole = connect(mesh, group)
    coords = tuple(0 if a == axis else c for a, c in enumerate(whole.coords))
    # one more axis of one rank, so that parameters have a mesh to be DTensors on that leaves the pipeline out
    sizes = [size for a, s in enumerate(mesh.sizes) for size in ((s, 1) if a == axis else (s,))]
    named = [n for a, x in enumerate(mesh.axes) for n in ((x.name, ALONE) if a == axis else (x.name,))]
    every = device_mesh_of(whole.device, whole.device_mesh.mesh.reshape(sizes), tuple(named))
    device_mesh = every[tuple(n for n in named if n != mesh.axes[axis].name)]
    names = tuple(device_mesh.get_group(a).group_name for a in range(len(inner.axes)))
    inside = replace(whole, mesh=inner, device_mesh=device_mesh, names=names, coords=coords)
    pipeline = every.get_group(mesh.axes[axis].name)
    return StageGroups(whole, inside, pipeline, whole.coords[axis])
