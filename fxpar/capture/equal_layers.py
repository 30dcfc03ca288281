"""Which layers of a module are equal but for their number, and the module without most of them.

Equal: the same classes, parameters and buffers (names, shapes, dtypes, requires_grad; none shared with another layer),
training flags and attributes, where an integer may count the layers. What layers *do* is compared elsewhere
(:mod:`fxpar.capture.op_stream`); this only says where it is worth looking.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.capture.stacks import Stack

LONGEST_PERIOD = 4
_OWN = {"_parameters", "_buffers", "_modules", "training"}
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
    "_load_state_dict_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def find_stacks(model: nn.Module, *, at_least: int) -> tuple[Stack, ...]:
    """The stacks of equal layers, none within another, that have ``at_least`` layers more than four units."""
    found: list[Stack] = []
    shared = Counter(id(t) for module in model.modules() for t in _tensors(module))
    for path, module in model.named_modules():
        if any(path.startswith(f"{stack.path}." if stack.path else "") for stack in found):
            continue
        names = list(module._modules)
        if len(names) > 4 and names == [str(i) for i in range(len(names))]:
            layers = [layer for layer in module._modules.values() if layer is not None]
            if len(layers) == len(set(map(id, layers))) == len(names):
                stack = longest_run(path, layer_classes(layers, shared))
                if stack is not None and stack.period * (stack.units - 4) >= at_least:
                    found.append(stack)
    return tuple(found)


def longest_run(path: str, classes: Sequence[Hashable]) -> Stack | None:
    """The units that save the most layers: equal from period to period."""
    best: Stack | None = None
    for period in range(1, LONGEST_PERIOD + 1):
        start = 0
        while start + period <= len(classes):
            end = start + period
            while end < len(classes) and classes[end] == classes[end - period]:
                end += 1
            stack = Stack(path, start, period, (end - start) // period)
            if best is None or stack.period * (stack.units - 4) > best.period * (best.units - 4):
                best = stack
            start = max(end - period + 1, start + 1)
    return best


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for table in (module._parameters, module._buffers):
        for tensor in table.values():
            if tensor is not None:
                yield tensor


def layer_classes(layers: Sequence[nn.Module], shared: Counter[int]) -> list[Hashable]:
    """Something equal for layers that are equal but for their number.

    Args:
        shared: how many modules of the whole model hold a tensor, by ``id``.
    """
    facts = [dict(_facts(layer, shared)) for layer in layers]
    counted = {
        key
        for key, first in facts[0].items()
        if all(type(f.get(key)) is int and f[key] - i == first for i, f in enumerate(facts))
    }
    return [
        frozenset((key, "its number" if key in counted else value) for key, value in layer.items()) for layer in facts
    ]


def _facts(layer: nn.Module, shared: Counter[int]) -> Iterator[tuple[tuple[str, str], Any]]:
    """((path, what), value) of everything that is compared."""
    own: Counter[int] = Counter(id(t) for module in layer.modules() for t in _tensors(module))
    first: dict[int, str] = {}
    for path, module in layer.named_modules(remove_duplicate=False):
        yield (path, "class"), type(module)
        yield (path, "training"), module.training
        yield (path, "modules"), tuple(name for name, child in module._modules.items() if child is not None)
        if any(module.__dict__.get(hooks) for hooks in _HOOKS):
            yield (path, "hooks"), _Unequal()
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in table.items():
                yield (path, f"{kind} {name}"), _stored(tensor, f"{path}.{name}", first, own, shared)
        for name, value in module.__dict__.items():
            if name not in _OWN and name not in _HOOKS:
                yield (path, f"attribute {name}"), _plain(value)


def _stored(
    tensor: Tensor | None, name: str, first: dict[int, str], own: Counter[int], shared: Counter[int]
) -> Hashable:
    if tensor is None:
        return None
    if shared[id(tensor)] != own[id(tensor)] or tensor._backward_hooks or type(tensor) not in (nn.Parameter, Tensor):
        return _Unequal()
    if getattr(tensor, "_post_accumulate_grad_hooks", None):
        return _Unequal()
    tie = first.setdefault(id(tensor), name)
    return (type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tie)


class _Unequal:
    """Equal to nothing but itself."""


def _plain(value: Any, depth: int = 3) -> Hashable:
    """An attribute by value where it is data; by identity where it could be anything."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return value if type(value) is int else (type(value), value)
    if isinstance(value, list | tuple) and depth:
        return (type(value), tuple(_plain(item, depth - 1) for item in value))
    if isinstance(value, set | frozenset) and depth:
        return (type(value), frozenset(_plain(item, depth - 1) for item in value))
    if isinstance(value, dict) and depth:
        return (type(value), tuple((_plain(k, 0), _plain(v, depth - 1)) for k, v in value.items()))
    if isinstance(value, nn.Module | Tensor) or not hasattr(value, "__dict__") or callable(value):
        return id(value)
    inside = getattr(value, "__dict__", {})
    return id(value) if not depth or len(inside) > 30 else (type(value), _plain(dict(inside), depth - 1))


def shorter_table(module: nn.Module, stack: Stack, units: int) -> dict[str, Any]:
    """The children of a stack's module when it has the first ``units - 1`` units and its last one."""
    layers = list(module._modules.values())
    kept = layers[: stack.first + (units - 1) * stack.period] + layers[stack.end - stack.period :]
    return {str(number): layer for number, layer in enumerate(kept)}


@contextmanager
def shortened(model: nn.Module, stacks: Sequence[Stack], units: int) -> Iterator[tuple[Stack, ...]]:
    """The model with the first ``units - 1`` units of every stack and its last one, for the duration.

    Gives the stacks as they are then.
    """
    tables: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for stack in stacks:
            module = model.get_submodule(stack.path)
            tables.append((module, module.__dict__["_modules"]))
            module.__dict__["_modules"] = shorter_table(module, stack, units)
        yield tuple(Stack(s.path, s.first, s.period, units) for s in stacks)
    finally:
        for module, table in tables:
            module.__dict__["_modules"] = table
