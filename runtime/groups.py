"""Process groups of a plan's mesh axes, resolved on this rank.

The plan stores axes; groups and their names are made here, at load, in the same order on every rank.

On CPUs they are groups of gloo with one thread each, where torch's have two. With collectives of one group under way on
two threads at once, gloo frees memory twice now and then (torch 2.13; a core dump shows the reference counts of its
``UnboundBuffer`` in a freed chunk; about once in 70 runs of a small pipeline, and not in as many hours with one).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpar.plans.errors import FxparError, PlanMismatch
from fxpar.plans.mesh import Mesh

ONE_THREAD = "gloo_one_thread"
"""Name under which torch knows the backend of our groups on CPUs."""


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
    device_mesh = device_mesh_of(device, _ranks(group, mesh).reshape(mesh.sizes), names)
    rank = dist.get_rank(group)
    groups = tuple(device_mesh.get_group(axis).group_name for axis in range(len(mesh.axes)))
    return MeshGroups(mesh, device_mesh, groups, rank, mesh.coordinates(rank), device, group)


def device_mesh_of(device: torch.device, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of processes ``ranks`` (one dim per axis) with a group along every axis."""
    if device.type != "cpu":
        return DeviceMesh(device.type, ranks, mesh_dim_names=names)
    dist.Backend.register_backend(ONE_THREAD, _gloo_of_one_thread, devices=["cpu"])
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, backend_override=((ONE_THREAD, None),) * len(names))


def _gloo_of_one_thread(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = [gloo.create_default_device()], 1, timeout
    return gloo(store, rank, size, options)


def _ranks(group: dist.ProcessGroup | None, mesh: Mesh) -> torch.Tensor:
    return torch.tensor(dist.get_process_group_ranks(group) if group is not None else range(mesh.world_size))


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
