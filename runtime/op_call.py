"""One op call of a program on real tensors: from plain-data args to what torch takes, and back to a row of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxpar.plans.program import Arg, Dtype, Ref
from fxpar.rules.factor_rule import argument_names, torch_op
from fxpar.runtime.local import torch_dtype

# A local tensor's strides are not those of the global one: a view of it may need a copy. The op is the same.
_LAX: Mapping[str, str] = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


def callable_op(op: str) -> Callable[..., Any]:
    """The torch op to call for a program's op name."""
    return torch_op(_LAX.get(op, op))


def map_arg(arg: Arg, value: Callable[[int], Any]) -> Any:
    """A program argument as torch takes it: ``value(id)`` for tensors, torch dtypes, lists."""
    if isinstance(arg, Ref):
        return value(arg.id)
    if isinstance(arg, Dtype):
        return torch_dtype(arg.name)
    if isinstance(arg, tuple):
        return [map_arg(item, value) for item in arg]
    return arg


def call_arguments(
    op: str, args: tuple[Arg, ...], value: Callable[[int], Any], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the call; a device argument that the program leaves open becomes ``device``."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    schema = torch_op(op)._schema.arguments
    for declared, name, arg in zip(schema, argument_names(op), args, strict=True):
        converted = map_arg(arg, value)
        if name == "device" and converted is None:
            converted = device
        if declared.kwarg_only:
            keywords[name] = converted
        else:
            positional.append(converted)
    return positional, keywords


def results(returned: Any, count: int) -> tuple[Any, ...]:
    """What an op returned as a row of ``count`` results: a list result is spread, missing ones are None."""
    row = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    if len(row) == 1 and isinstance(row[0], (tuple, list)):
        row = tuple(row[0])
    return row + (None,) * (count - len(row))
