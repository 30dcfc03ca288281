"""Parameters and buffers of the user's model against those of the plan, and as DTensors.

``differences`` compares names, ties, shapes, dtypes and requires_grad, and the sources of the module classes;
``shard`` replaces every parameter of the module tree by a DTensor of which this rank holds its piece.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from fxpar.plans.errors import PlanFileError
from fxpar.plans.layout import Dims, Layout, layout_text
from fxpar.plans.plan import Plan
from fxpar.plans.program import Input, Program
from fxpar.runtime.groups import MeshGroups
from fxpar.runtime.pieces import scatter
from fxpar.runtime.surface import torch_placements


@dataclass(frozen=True)
class Stored:
    """One parameter or buffer of a model under all its names."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    kind: str


def stored_tensors(model: nn.Module) -> tuple[Stored, ...]:
    """Parameters, then buffers, tied ones once, in the order of ``named_parameters``."""
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[torch.Tensor, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = (parameter, "parameter")
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) not in found or found[id(buffer)][1] == "buffer":
            names.setdefault(id(buffer), []).append(name)
            found[id(buffer)] = (buffer, "buffer")
    return tuple(Stored(tensor, tuple(names[key]), kind) for key, (tensor, kind) in found.items())


def module_sources(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(class, sha256 of its source) of every module class of the model but torch's own, sorted by class.

    A class made in a shell or by exec has no source and is left out.
    """
    classes = sorted({type(m) for m in model.modules()}, key=lambda c: (c.__module__, c.__qualname__))
    result = []
    for c in classes:
        if c.__module__.split(".")[0] == "torch":
            continue
        try:
            text = inspect.getsource(c)
        except (OSError, TypeError):
            continue
        result.append((f"{c.__module__}.{c.__qualname__}", hashlib.sha256(text.encode()).hexdigest()))
    return tuple(result)


def differences(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """Every way in which ``model`` is not the model of the plan, one line each; empty when it is."""
    return (*_stored_differences(plan.program, model), *_source_differences(plan, model))


def _stored_differences(program: Program, model: nn.Module) -> Iterator[str]:
    have = {name: s for s in stored_tensors(model) for name in s.names}
    known: set[str] = set()
    for entry in program.inputs:
        if entry.kind not in ("parameter", "buffer"):
            continue
        names = (entry.name, *entry.ties)
        known.update(names)
        stored = have.get(entry.name)
        if stored is None:
            yield f"the model has no {entry.kind} {entry.name}"
            continue
        if stored.kind != entry.kind:
            yield f"{entry.name} is a {stored.kind} of the model, a {entry.kind} of the plan"
            continue
        if set(stored.names) != set(names):
            mine = ", ".join(n for n in stored.names if n != entry.name) or "nothing"
            yield f"{entry.name} is tied to {mine}, in the plan to {', '.join(entry.ties) or 'nothing'}"
        want = program.types[entry.value]
        dtype = str(stored.tensor.dtype).removeprefix("torch.")
        if tuple(stored.tensor.shape) != want.shape:
            yield f"{entry.name} has shape {list(stored.tensor.shape)}, in the plan {list(want.shape)}"
        if dtype != want.dtype:
            yield f"{entry.name} is {dtype}, in the plan {want.dtype}"
        if entry.kind == "parameter" and stored.tensor.requires_grad != entry.requires_grad:
            yield f"{entry.name} has requires_grad={stored.tensor.requires_grad}, in the plan {entry.requires_grad}"
    for name, stored in have.items():
        if name not in known:
            yield f"the plan has no {stored.kind} {name}"


def _source_differences(plan: Plan, model: nn.Module) -> Iterator[str]:
    """By the class's own name: the same file is one module for a compiler and another for a training script."""
    mine: dict[str, set[str]] = {}
    for name, digest in module_sources(model):
        mine.setdefault(name.rpartition(".")[2], set()).add(digest)
    for name, digest in plan.fingerprint.modules:
        found = mine.get(name.rpartition(".")[2])
        if found is not None and digest not in found:
            yield f"the source of class {name} has changed since the plan was compiled"


def same_everywhere(model: nn.Module, groups: MeshGroups) -> tuple[str, ...]:
    """Make values that differ between ranks equal to rank 0's, as DDP does; the names of what was sent."""
    stored = stored_tensors(model)
    device = groups.device
    if not stored:
        return ()
    marks = torch.stack([_mark(s.tensor.detach()) for s in stored]).to(device)
    low, high = marks.clone(), marks.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=groups.everyone)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=groups.everyone)
    differing = [s for s, same in zip(stored, (low == high).all(1).tolist(), strict=True) if not same]
    root = dist.get_global_rank(groups.everyone, 0) if groups.everyone is not None else 0
    for s in differing:
        value = s.tensor.detach().to(device).contiguous()
        dist.broadcast(value, src=root, group=groups.everyone)
        s.tensor.data.copy_(value)
    return tuple(s.names[0] for s in differing)


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    """Two int64 that tell tensors apart: the xor of all elements' bits (1s in pairs cancel) and their sum's."""
    flat = tensor.contiguous().reshape(-1)
    if not flat.numel():
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    flat = flat.view(torch.uint8) if flat.dtype in (torch.bool, torch.complex64, torch.complex128) else flat
    total = flat.sum(dtype=torch.float64)
    return torch.stack([torch.hash_tensor(flat).view(torch.int64), total.view(torch.int64)])


def shard(
    model: nn.Module, program: Program, layouts: tuple[Layout, ...], groups: MeshGroups
) -> dict[int, nn.Parameter]:
    """Replace the parameters of ``model`` by DTensors, ties kept, and move its buffers to the device.

    Returns:
        The new parameter of every parameter input, by value id.

    Raises:
        PlanFileError: a stored layout cannot be said in torch's placements.
    """
    tensors = {name: s.tensor for s in stored_tensors(model) for name in s.names}
    result: dict[int, nn.Parameter] = {}
    for entry, layout in zip(program.inputs, layouts, strict=True):
        if entry.kind == "parameter":
            parameter = sharded_parameter(tensors[entry.name], entry, program.dims[entry.value], layout, groups)
            result[entry.value] = parameter
            for name in (entry.name, *entry.ties):
                module, key = owner_module(model, name)
                module.register_parameter(key, parameter)
        elif entry.kind == "buffer":
            for name in (entry.name, *entry.ties):
                module, key = owner_module(model, name)
                setattr(module, key, tensors[entry.name].to(groups.device))
    return result


def sharded_parameter(
    tensor: torch.Tensor, entry: Input, dims: Dims, layout: Layout, groups: MeshGroups
) -> nn.Parameter:
    """The parameter as a DTensor of which this rank holds its piece.

    Raises:
        PlanFileError: the layout cannot be said in torch's placements.
    """
    return _sharded(tensor, dims, layout, _placements(entry, dims, layout, groups), groups)


def _placements(entry: Input, dims: Dims, layout: Layout, groups: MeshGroups) -> tuple[Placement, ...]:
    placements = torch_placements(layout, dims, groups.mesh)
    if placements is None:
        raise PlanFileError(
            f"the plan stores {entry.name} as {layout_text(layout)}, which torch's placements cannot say",
            way_out="compile the plan again with `fxpar compile`",
        )
    return placements


def _sharded(
    tensor: torch.Tensor, dims: Dims, layout: Layout, placements: tuple[Placement, ...], groups: MeshGroups
) -> nn.Parameter:
    whole = tensor.detach()
    local = scatter(whole, dims, layout, groups.mesh, groups.coords).to(groups.device)
    if local.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() or not local.is_contiguous():
        local = local.clone(memory_format=torch.contiguous_format)  # let go of the whole
    return nn.Parameter(as_dtensor(local, placements, tuple(whole.shape), groups), requires_grad=tensor.requires_grad)


def as_dtensor(
    local: torch.Tensor, placements: tuple[Placement, ...], shape: tuple[int, ...], groups: MeshGroups
) -> DTensor:
    """A DTensor around a local tensor, without communication."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return DTensor.from_local(
        local, groups.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def owner_module(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that a dotted name's last part is an attribute of, and that part."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
