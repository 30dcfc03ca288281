"""Process groups of a plan's mesh axes, resolved on this rank.

The plan stores axes; groups and their names are made here, at load, in the same order on every rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxpar.plans.errors import FxparError, PlanMismatch
from fxpar.plans.mesh import Mesh


@dataclass(frozen=True)
class MeshGroups:
    """A mesh on real ranks.

    Attributes:
        mesh: the plan's mesh.
        device_mesh: the same mesh as torch knows it; parameters are DTensors on it.
        names: per axis, the name of this rank's group along it.
        rank: position of this process among the mesh's ranks.
        coords: this rank's position on every axis.
        device: where this rank's tensors live.
        everyone: the group of all ranks (None: torch's default group).
    """

    mesh: Mesh
    device_mesh: DeviceMesh
    names: tuple[str, ...]
    rank: int
    coords: tuple[int, ...]
    device: torch.device
    everyone: dist.ProcessGroup | None


def connect(mesh: Mesh, group: dist.ProcessGroup | None = None) -> MeshGroups:
    """Groups of every axis of ``mesh`` over the ranks of ``group`` (default: all processes).

    Starts torch.distributed when the process was launched by torchrun, or when the mesh is one rank, and it is not
    started yet: NCCL where CUDA is there, else gloo.

    Raises:
        FxparError: torch.distributed is not started and cannot be.
        PlanMismatch: the number of ranks is not the plan's.
    """
    if not dist.is_initialized():
        _start(mesh)
    size = dist.get_world_size(group)
    if size != mesh.world_size:
        raise PlanMismatch(
            f"the plan is for {mesh.world_size} ranks ({mesh}), this run has {size}",
            way_out=f"start it with torchrun --nproc-per-node {mesh.world_size}, or compile with --mesh {size}",
        )
    device = _device(group)
    names = tuple(axis.name for axis in mesh.axes)
    if group is None:
        device_mesh = init_device_mesh(device.type, mesh.sizes, mesh_dim_names=names)
    else:
        ranks = torch.tensor(dist.get_process_group_ranks(group)).reshape(mesh.sizes)
        device_mesh = DeviceMesh(device.type, ranks, mesh_dim_names=names)
    rank = dist.get_rank(group)
    groups = tuple(device_mesh.get_group(axis).group_name for axis in range(len(mesh.axes)))
    return MeshGroups(mesh, device_mesh, groups, rank, mesh.coordinates(rank), device, group)


def _start(mesh: Mesh) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    elif mesh.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        raise FxparError(
            f"the plan is for {mesh.world_size} ranks ({mesh}), this is one process",
            way_out=f"start it with torchrun --nproc-per-node {mesh.world_size}",
        )


def _device(group: dist.ProcessGroup | None) -> torch.device:
    if "nccl" in dist.get_backend(group) and torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count()))
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")
