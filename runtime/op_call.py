"""One op call of a program as torch takes it: from plain-data args to positional and keyword arguments, and back to a
row of results. Used with tensors (virtual mesh) and with FX nodes (code generation) alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxpar.plans.program import Arg
from fxpar.runtime.interpret import concrete, split_arguments


def call_arguments(
    op: str, args: tuple[Arg, ...], values: Mapping[int, Any], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the call; a device argument that the program leaves open becomes ``device``."""
    return split_arguments(op, [concrete(arg, values) for arg in args], device)


def results(returned: Any, count: int) -> tuple[Any, ...]:
    """What an op returned as a row of ``count`` results: a list result is spread, missing ones are None."""
    row = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    return row + (None,) * (count - len(row))
