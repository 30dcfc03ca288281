"""Parameters of a plan with stages: each rank holds those that its stages read or own; the others have no values there.

A parameter that stages on several ranks read is trained on its owner's; the others hold a copy, which every step
begins by renewing. ``state_dict`` of a rank has what the rank owns, under the model's own names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program
from fxpar.plans.stages import Stages
from fxpar.runtime.parameters import owner_module, sharded_parameter, stored_tensors
from fxpar.runtime.stage_groups import StageGroups


def users_of(stages: Stages, places: tuple[int, ...], index: int) -> frozenset[int]:
    """Places of the pipeline whose ranks hold the parameter at an input position."""
    using = {places[s] for s, one in enumerate(stages.stages) if index in one.inputs}
    return frozenset(using | {places[stages.owners[index]]})


def shard_stages(
    model: nn.Module, program: Program, decisions: Decisions, stages: Stages, places: tuple[int, ...],
    groups: StageGroups,
) -> dict[int, nn.Parameter]:
    """Replace the parameters of ``model``, ties kept: by DTensors on the mesh inside a stage where this rank holds
    them, by tensors without values (device meta) where it does not. Buffers move to the device.

    Returns:
        The parameters that this rank holds, by position among the program's inputs.

    Raises:
        PlanFileError: a stored layout cannot be said in torch's placements.
    """
    tensors = {name: s.tensor for s in stored_tensors(model) for name in s.names}
    held: dict[int, nn.Parameter] = {}
    dropped: set[str] = set()  # names that this rank's state has not
    for index, (entry, layout) in enumerate(zip(program.inputs, decisions.inputs, strict=True)):
        if entry.kind == "buffer":
            for name in (entry.name, *entry.ties):
                module, key = owner_module(model, name)
                setattr(module, key, tensors[entry.name].to(groups.inside.device))
        if entry.kind != "parameter":
            continue
        whole = tensors[entry.name]
        owned = places[stages.owners[index]] == groups.place
        if groups.place in users_of(stages, places, index):
            parameter = sharded_parameter(whole, entry, program.dims[entry.value], layout, groups.inside)
            held[index] = parameter
        else:
            parameter = nn.Parameter(torch.empty_like(whole, device="meta"))
        parameter.requires_grad_(entry.requires_grad and owned)
        for name in (entry.name, *entry.ties):
            module, key = owner_module(model, name)
            module.register_parameter(key, parameter)
            if not owned:
                dropped.add(name)

    def own_entries(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name in dropped:
            state.pop(prefix + name, None)

    model.register_state_dict_post_hook(own_entries)
    return held
