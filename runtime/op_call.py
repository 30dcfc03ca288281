"""One op call of a program as torch takes it: from plain-data args to positional and keyword arguments, and back to a
row of results. Used with tensors (virtual mesh) and with FX nodes (code generation) alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxpar.plans.program import Arg
from fxpar.runtime.interpret import concrete, device_argument, operator_of


def call_arguments(
    op: str, args: tuple[Arg, ...], values: Mapping[int, Any], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the call; a device argument that the program leaves open becomes ``device``."""
    row = [concrete(arg, values) for arg in args]
    position = device_argument(op)
    if position is not None and row[position] is None:
        row[position] = device
    schema = operator_of(op)._schema.arguments
    positional = [a for a, declared in zip(row, schema, strict=True) if not declared.kwarg_only]
    named = {
        d.name: a for a, d in zip(row, schema, strict=True)
        if d.kwarg_only and (a is not None or not d.has_default_value())
    }
    return positional, named


def results(returned: Any, count: int) -> tuple[Any, ...]:
    """What an op returned as a row of ``count`` results: a list result is spread, missing ones are None."""
    row = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    return row + (None,) * (count - len(row))
