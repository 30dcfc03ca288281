"""Whole values of a loaded model's parameters and gradients, under every name, on every rank, whatever the plan."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fxpar.runtime.model import ParallelModule
from fxpar.runtime.pipeline import PipelineRunner


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's global value; a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_parameters(model: ParallelModule) -> dict[str, torch.Tensor]:
    """Copies of all parameters' values. Every rank must call it."""
    return {name: tensor for name, tensor in _gathered(model, "values").items() if tensor is not None}


def whole_gradients(model: ParallelModule) -> dict[str, torch.Tensor | None]:
    """Copies of all gradients, None where there is none. Every rank must call it."""
    return _gathered(model, "gradient")


def _gathered(model: ParallelModule, of: str) -> dict[str, torch.Tensor | None]:
    runner = model._fxpar.runner
    if isinstance(runner, PipelineRunner):
        return {
            name: tensor for index, entry in enumerate(runner.program.inputs) if entry.kind == "parameter"
            for tensor in (runner.whole(index, of),) for name in (entry.name, *entry.ties)
        }
    found: dict[int, torch.Tensor | None] = {}
    for parameter in model.parameters():
        tensor = parameter.detach() if of == "values" else parameter.grad
        found[id(parameter)] = None if tensor is None else whole(tensor).clone()
    return {name: found[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
