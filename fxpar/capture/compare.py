"""Checks a program against eager on real tensors, where the route that traced it may have lost a backward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.capture.adapter import pytree
from fxpar.capture.call import bind_call
from fxpar.capture.outputs import LossFunction, loss_of
from fxpar.plans.errors import CaptureError
from fxpar.plans.program import Program


def example_values(
    program: Program, model: nn.Module, args: tuple, kwargs: dict[str, Any], *, seed: int = 0
) -> dict[int, Tensor]:
    """A tensor for every input of the program: the model's, the call's, tangent 1 and ``seed``."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    call = bind_call(getattr(model, "_orig_mod", model).forward, args, kwargs)
    leaves = dict(zip(call.paths, call.leaves, strict=True))
    values: dict[int, Tensor] = {}
    for entry in program.inputs:
        kind = program.types[entry.value]
        if entry.kind in ("parameter", "buffer"):
            values[entry.value] = tensors[entry.name].detach()
        elif entry.kind == "input":
            values[entry.value] = leaves[entry.name]
        elif entry.kind == "tangent":
            values[entry.value] = torch.ones(kind.shape, dtype=getattr(torch, kind.dtype))
        elif entry.kind == "seed":
            values[entry.value] = torch.tensor(seed)
    return values


def eager_step(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], loss: LossFunction | None
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """(loss, gradient per parameter name) of a copy of the model."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.grad = None
    inputs = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    output = twin(*inputs[0], **inputs[1])
    value = loss_of(output) if loss is None else loss(output, inputs)
    value.backward()
    return value.detach(), {name: p.grad for name, p in twin.named_parameters()}


def check_gradients(
    program: Program, model: nn.Module, args: tuple, kwargs: dict[str, Any], loss: LossFunction | None, reason: str
) -> None:
    """Compare loss and gradients of a program with eager.

    Args:
        reason: why the program had to be traced without following Python.

    Raises:
        CaptureError: they differ, or the model draws random numbers (then nothing can be compared).
    """
    from fxpar.runtime.interpret import run_global

    if any(entry.kind == "seed" for entry in program.inputs):
        raise CaptureError(
            "the model had to be traced without following its Python, and random numbers keep it from being checked",
            numbers=reason,
            way_out="remove what stops tracing, or capture with dropout 0",
        )
    value, expected = eager_step(model, args, kwargs, loss)
    results = run_global(program, example_values(program, model, args, kwargs))
    got = {(output.kind, output.name): tensor for output, tensor in zip(program.outputs, results, strict=True)}
    wrong = [] if close(got[("loss", "loss")], value) else ["loss"]
    for name, gradient in expected.items():
        mine = got.get(("gradient", name))
        if (mine is None) != (gradient is None) or (mine is not None and not close(mine, gradient)):
            wrong.append(name)
    if wrong:
        raise CaptureError(
            "the model had to be traced without following its Python, and the result differs from eager",
            numbers=(f"gradients that differ: {', '.join(wrong[:8])}", reason),
            way_out="a hand-written backward or a hook was lost: remove what stops tracing",
        )


def close(got: Tensor, want: Tensor | None) -> bool:
    """Equal to 1e-3 of the largest entry: a lost backward is off by far more."""
    if want is None:
        return False
    scale = float(want.abs().max()) if want.numel() else 0.0
    return torch.allclose(got.to(want.dtype), want, rtol=1e-3, atol=1e-3 * scale + 1e-7, equal_nan=True)
