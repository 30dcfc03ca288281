"""The user's call as named leaves: which path each tensor of (args, kwargs) has, and what is baked in.

Paths read like the expression a user would write inside ``forward``: ``input_ids``, ``batch['x'][0]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxpar.capture.adapter import pytree
from fxpar.plans.errors import CaptureError
from fxpar.runtime.binding import key_text


@dataclass(frozen=True)
class Call:
    """``leaves`` in pytree order of (args, kwargs), ``paths`` alike; ``parameters`` are forward's positional names."""

    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    structure: pytree.TreeSpec
    parameters: tuple[str, ...]

    @property
    def tensors(self) -> tuple[int, ...]:
        """Positions of the tensor leaves."""
        return tuple(i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor))

    @property
    def baked(self) -> tuple[tuple[str, str], ...]:
        """(path, repr) of every leaf that is no tensor."""
        return tuple(
            (path, repr(leaf))
            for path, leaf in zip(self.paths, self.leaves, strict=True)
            if not isinstance(leaf, torch.Tensor)
        )


def bind_call(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Call:
    """Name the leaves of a call of ``forward``.

    Raises:
        CaptureError: the arguments do not fit forward's signature.
    """
    signature = inspect.signature(forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the example inputs do not fit the model's forward: {error}",
            where=f"forward{signature}",
            way_out="example_inputs() returns (args, kwargs) as the model is called",
        ) from error
    kinds = inspect.Parameter
    positional = [
        p.name for p in signature.parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    rest = [p.name for p in signature.parameters.values() if p.kind == kinds.VAR_POSITIONAL]
    flat: tuple[list[tuple[Any, Any]], Any] = pytree.tree_flatten_with_path((args, kwargs))
    keyed, structure = flat
    paths = []
    for (side, first, *inner), _ in keyed:
        if side.idx == 1:
            name = str(first.key)
        elif first.idx < len(positional):
            name = positional[first.idx]
        else:
            name = f"{rest[0]}[{first.idx - len(positional)}]"
        paths.append(name + "".join(map(key_text, inner)))
    parameters = (*positional, *(f"*{name}" for name in rest))
    return Call(tuple(leaf for _, leaf in keyed), tuple(paths), structure, parameters)
