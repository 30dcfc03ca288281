"""Fake stand-ins for a model's tensors while it is traced.

:func:`traceable` swaps, for the duration of a ``with`` block, every parameter and buffer by a fake CPU tensor (one
per unique tensor, so ties stay ties) and takes ``torch.compile`` wrappers out; afterwards the model is as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxpar.capture.adapter import FakeTensorMode, fake_like, wrapped_by_compile
from fxpar.capture.experts_calls import experts_replaced
from fxpar.capture.recorded_outputs import install_recorders


@dataclass(frozen=True)
class Stored:
    """One parameter or buffer of the user's model under its qualified names, first name first."""

    tensor: Tensor
    names: tuple[str, ...]
    kind: Literal["parameter", "buffer"]
    persistent: bool


@dataclass(frozen=True)
class StandIns:
    """``model`` without wrappers; ``stored[id(fake)]`` says whose stand-in a fake tensor is; ``paths[id(module)]``
    is a module's dotted path without wrappers; ``originals`` lists the user's tensors in order."""

    model: nn.Module
    originals: tuple[Stored, ...]
    stored: dict[int, Stored]
    paths: dict[int, str]
    keep_alive: list[Tensor] = field(default_factory=list)


def stored_tensors(model: nn.Module) -> dict[int, Stored]:
    """Parameters, then buffers, of ``model`` by ``id``, names in the order of ``named_parameters``."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, tuple[Tensor, Literal["parameter", "buffer"]]] = {}
    persistent: dict[int, bool] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = (parameter, "parameter")
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            listed = names.setdefault(id(buffer), [])
            name = f"{prefix}.{key}" if prefix else key
            if name not in listed:
                listed.append(name)
            tensors.setdefault(id(buffer), (buffer, "buffer"))
            saved = key not in module._non_persistent_buffers_set
            persistent[id(buffer)] = persistent.get(id(buffer), False) or saved
    return {
        key: Stored(tensor, tuple(names[key]), kind, persistent.get(key, True))
        for key, (tensor, kind) in tensors.items()
    }


def unwrapped(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile``."""
    current: Any = module
    while wrapped_by_compile(current):
        current = current._orig_mod
    return current


@contextmanager
def without_compile_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Compiled submodules replaced by the modules they wrap, in-place ``Module.compile`` switched off."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    switched: list[tuple[nn.Module, object]] = []
    root = unwrapped(model)
    try:
        for module in list(root.modules()):
            for key, child in list(module._modules.items()):
                if child is not None and wrapped_by_compile(child):
                    replaced.append((module, key, child))
                    module._modules[key] = unwrapped(child)
        for module in list(root.modules()):
            if module.__dict__.get("_compiled_call_impl") is not None:
                switched.append((module, module.__dict__["_compiled_call_impl"]))
                module.__dict__["_compiled_call_impl"] = None
        yield root
    finally:
        for module, key, child in replaced:
            module._modules[key] = child
        for module, call in switched:
            module.__dict__["_compiled_call_impl"] = call


@contextmanager
def traceable(model: nn.Module, fake_mode: FakeTensorMode, gradients: bool = True) -> Iterator[StandIns]:
    """The model made of fake tensors, its plain experts calling our op; restored on exit, also when tracing fails.

    Without ``gradients`` no stand-in requires one.
    """
    known = stored_tensors(model)
    fakes: dict[int, Tensor] = {}
    stored: dict[int, Stored] = {}
    undo: list[tuple[Any, str, Tensor]] = []
    flat_weights: list[tuple[nn.RNNBase, list]] = []

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            fake = fake_like(tensor, fake_mode)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=gradients and tensor.requires_grad)
            fakes[id(tensor)] = fake
            stored[id(fake)] = known[id(tensor)]
        return fakes[id(tensor)]

    with ExitStack() as stack:
        root = stack.enter_context(without_compile_wrappers(model))
        paths = {id(module): name for name, module in reversed(list(root.named_modules(remove_duplicate=False)))}
        try:
            for module in list(root.modules()):
                tables: tuple[Any, Any] = (module._parameters, module._buffers)
                for table in tables:
                    for key, tensor in list(table.items()):
                        if tensor is not None and id(tensor) in known:
                            undo.append((table, key, tensor))
                            table[key] = stand_in(tensor)
                if isinstance(module, nn.RNNBase):
                    flat_weights.append((module, module._flat_weights))
                    module._flat_weights = [
                        fakes.get(id(weight), weight) if weight is not None else None for weight in module._flat_weights
                    ]
            install_recorders(root)
            stack.enter_context(experts_replaced(root))
            yield StandIns(root, tuple(known.values()), stored, paths, list(fakes.values()))
        finally:
            for table, key, tensor in undo:
                table[key] = tensor
            for rnn, weights in flat_weights:
                rnn._flat_weights = weights


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` for the block, every module's mode restored after."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def refuse_sparse(model: nn.Module) -> list[str]:
    """Names of embeddings that ask for sparse gradients."""
    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]


def on_meta(originals: Sequence[Stored]) -> bool:
    """True when some tensor of the user's model has no values."""
    return any(entry.tensor.device.type == "meta" for entry in originals)


def example_fakes(leaves: list[object], fake_mode: FakeTensorMode) -> list[object]:
    """Every tensor leaf as a fake of its own: one tensor given twice must not become one input."""
    return [fake_like(leaf, fake_mode) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
