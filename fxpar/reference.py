"""The numbers a plan must reproduce: one process, eager, on the whole batch.

Judged in float64 the reference must not round in between, so every float32 that the model asks for by name
(``.float()``, ``dtype=torch.float32``) is answered in float64, as the plan's retyped program does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxpar.model_source import ModelSource

DTYPES = {"f32": torch.float32, "f64": torch.float64}
TRAIN_STEPS = 3
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Record:
    """Loss, gradients by parameter name, buffers after the step; losses, norms and parameters of a short training."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


class _Wider(TorchFunctionMode):
    """float32 asked for by name becomes float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        if func is not torch.Tensor.type:
            swap = {torch.float32: torch.float64, torch.complex64: torch.complex128}
            args = pytree.tree_map(lambda a: swap.get(a, a) if isinstance(a, torch.dtype) else a, args)
            kwargs = pytree.tree_map(lambda a: swap.get(a, a) if isinstance(a, torch.dtype) else a, kwargs)
        return func(*args, **kwargs)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Everything inside runs in ``dtype`` (float32 as it is; float64: nothing is rounded to float32)."""
    if dtype is not torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider():
            yield
    finally:
        torch.set_default_dtype(before)


def widen(tree: Any, dtype: torch.dtype) -> Any:
    """float32 tensors of a pytree in ``dtype`` (complex64 to match), detached copies."""
    swap = {torch.float32: dtype, torch.complex64: torch.complex128 if dtype is torch.float64 else torch.complex64}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().clone().to(swap.get(leaf.dtype, leaf.dtype))

    return pytree.tree_map(one, tree)


def widen_module(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its float32 (complex64) parameters and buffers in ``dtype``; ties stay ties."""
    if dtype is torch.float64:
        with torch.no_grad():
            for module in model.modules():
                for parameter in module.parameters(recurse=False):
                    if parameter.dtype is torch.float32:
                        parameter.data = parameter.data.double()
                    elif parameter.dtype is torch.complex64:
                        parameter.data = parameter.data.to(torch.complex128)
                for name, buffer in list(module.named_buffers(recurse=False)):
                    if buffer.dtype in (torch.float32, torch.complex64):
                        module._buffers[name] = widen(buffer, dtype)
    return model


def built(source: ModelSource, dtype: torch.dtype, state: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """The model on the CPU, deterministic, in ``dtype``, optionally with the weights of ``state``."""
    torch.manual_seed(source.seed)
    model = source.build()
    if state is not None:
        model.load_state_dict(state)
    return widen_module(model, dtype)


def eager_step(source: ModelSource, model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """One forward and backward of the model; gradients are left in ``.grad``. Returns the loss."""
    args, kwargs = widen(source.example_inputs(), dtype)
    with computing_in(dtype):
        torch.manual_seed(source.seed + 1)
        loss = source.loss(model(*args, **kwargs), (args, kwargs))
        loss.backward()
    return loss.detach()


def optimizer_of(parameters: Any, dtype: torch.dtype) -> torch.optim.Optimizer:
    """AdamW with an eps that does not blow up rounding noise in tiny gradients."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.01)


def eager_record(
    source: ModelSource, dtype: torch.dtype, *, train: bool, state: dict[str, torch.Tensor] | None = None
) -> Record:
    """The reference of one step, and of a short training with clipping when ``train``."""
    model = built(source, dtype, state)
    loss = eager_step(source, model, dtype)
    return _finish(model, loss, lambda: eager_step(source, model, dtype), train, dtype)


def _finish(
    model: nn.Module, loss: torch.Tensor, step: Callable[[], torch.Tensor], train: bool, dtype: torch.dtype
) -> Record:
    named = list(model.named_parameters(remove_duplicate=False))
    gradients = {n: None if p.grad is None else p.grad.detach().clone() for n, p in named}
    buffers = {n: b.detach().clone() for n, b in model.named_buffers(remove_duplicate=False)}
    losses, norms = [], []
    if train:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizer_of(trained, dtype)
        for index in range(TRAIN_STEPS):
            if index:
                optimizer.zero_grad(set_to_none=True)
                loss = step()
            norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)))
            optimizer.step()
            losses.append(float(loss))
    return Record(loss, gradients, buffers, losses, norms, {n: p.detach().clone() for n, p in named} if train else {})


def program_record(
    model: nn.Module, run: Callable[[int], tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]],
    dtype: torch.dtype, *, train: bool,
) -> Record:
    """The reference of a program that draws random numbers: the same program, whole, in this process.

    ``run(step)`` runs it on the model's current weights and gives loss, gradients and new buffers by name.
    """
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        loss, gradients, buffers = run(count)
        count += 1
        for name, parameter in model.named_parameters():
            parameter.grad = gradients.get(name)
        own = dict(model.named_buffers())
        for name, value in buffers.items():
            own[name].copy_(value)
        return loss

    return _finish(model, step(), step, train, dtype)


