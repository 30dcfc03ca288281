"""Between the user's call and the program: which tensor is which input, and the outputs in the model's structure.

A path reads like the expression one would write inside ``forward``: ``input_ids``, ``batch['x'][0]``; it does not
depend on whether an argument was passed by position or by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxpar.plans.errors import FxparError, collect_errors
from fxpar.plans.program import Arg, Program, whole_type


def leaf_paths(call: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf of a call whose positional parameters are ``call`` (``*name`` for the rest).

    Raises:
        FxparError: more positional arguments than parameters.
    """
    named = [name for name in call if not name.startswith("*")]
    rest = next((name[1:] for name in call if name.startswith("*")), None)
    if len(args) > len(named) and rest is None:
        raise FxparError(
            f"the model takes {len(named)} positional arguments, got {len(args)}",
            numbers=f"they are {', '.join(named)}",
        )
    found = []
    keyed: Any = pytree.tree_flatten_with_path((args, kwargs))[0]
    for (side, first, *inner), leaf in keyed:
        if side.idx == 1:
            name = str(first.key)
        elif first.idx < len(named):
            name = named[first.idx]
        else:
            name = f"{rest}[{first.idx - len(named)}]"
        found.append((name + "".join(map(key_text, inner)), leaf))
    return found


def key_text(key: Any) -> str:
    """One step of a path: ``['x']``, ``[0]`` or ``.name``."""
    if isinstance(key, pytree.SequenceKey):
        return f"[{key.idx}]"
    if isinstance(key, pytree.MappingKey):
        return f"[{key.key!r}]"
    if isinstance(key, pytree.GetAttrKey):
        return f".{key.name}"
    return str(key)


def bind(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
    """The global tensor of every ``input`` of the program, by value id: of the whole batch, however it is run.

    Raises:
        FxparError: an input is missing, unknown, or of another shape or dtype; or an argument that is no tensor
            differs from what the plan was compiled with. All differences at once.
    """
    wanted: dict[str, list[int]] = {}  # positions: microbatches may read an input both whole and in parts
    for position, entry in enumerate(program.inputs):
        if entry.kind == "input":
            wanted.setdefault(entry.name, []).append(position)
    baked = dict(program.baked)
    tensors: dict[int, torch.Tensor] = {}
    seen: set[str] = set()
    with collect_errors() as errors:
        for path, leaf in leaf_paths(program.call, args, kwargs):
            seen.add(path)
            with errors.catching():
                if isinstance(leaf, torch.Tensor):
                    if path not in wanted:
                        raise _unknown(path, wanted, baked)
                    for position in wanted[path]:
                        tensors[program.inputs[position].value] = _checked(position, leaf, program)
                else:
                    _check_baked(path, leaf, wanted, baked)
        for path, positions in wanted.items():
            if path not in seen:
                kind = whole_type(program, positions[0])
                errors.add(
                    FxparError(f"the input {path} is missing", numbers=f"expected {list(kind.shape)} {kind.dtype}")
                )
        for path, literal in baked.items():
            if path not in seen and literal != "None":
                was = f"the plan was compiled with {path}={literal}"
                errors.add(FxparError(f"the argument {path} is missing", numbers=was))
    return tensors


def _checked(position: int, tensor: torch.Tensor, program: Program) -> torch.Tensor:
    entry, want = program.inputs[position], whole_type(program, position)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != want.shape or dtype != want.dtype:
        raise FxparError(
            f"the input {entry.name} is {list(tensor.shape)} {dtype}, the plan expects {list(want.shape)} {want.dtype}",
            way_out="pass the GLOBAL batch of the compiled size on every rank, or compile again for this size",
        )
    if tensor.requires_grad:
        raise FxparError(
            f"the input {entry.name} requires a gradient, which the plan does not compute",
            way_out=f"pass {entry.name}.detach()",
        )
    return tensor


def _unknown(path: str, wanted: Mapping[str, object], baked: dict[str, str]) -> FxparError:
    if path in baked:
        return FxparError(
            f"the argument {path} is a tensor", numbers=f"the plan was compiled with {path}={baked[path]}"
        )
    return FxparError(
        f"the plan knows no input {path}",
        numbers=f"its inputs are {', '.join(wanted)}",
        way_out="leave it out, or compile with example inputs that have it",
    )


def _check_baked(path: str, leaf: Any, wanted: Mapping[str, object], baked: dict[str, str]) -> None:
    if path in wanted:
        raise FxparError(f"the input {path} is a {type(leaf).__name__}, the plan expects a tensor")
    known = baked.get(path, "None")
    if repr(leaf) != known:
        was = f"the plan was compiled with {path}={known}" if path in baked else "the plan was compiled without it"
        raise FxparError(
            f"the argument {path} is {leaf!r}",
            numbers=was,
            way_out="pass the same value, or compile again with this one",
        )


class Output(dict[str, Any]):
    """A model's output with named parts: ``out["loss"]`` and ``out.loss``; ``out[0]`` is the first part."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the output has no {name}; it has {', '.join(self)}") from None

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, int | slice):
            return tuple(self.values())[key]
        return super().__getitem__(key)


def structured(structure: Arg, value: Callable[[int], Any]) -> Any:
    """The output structure of a program around ``value(index)``, the tensor of output ``index``.

    Objects (a transformers ModelOutput ...) come back as :class:`Output`: a plan never names a class to import.
    """
    match structure:
        case ("value", int(index)):
            return value(index)
        case ("const", literal):
            return literal
        case ("dict", tuple(keys), *children):
            return dict(zip(map(str, keys), (structured(c, value) for c in children), strict=True))
        case ("object", str(), tuple(keys), *children):
            return Output(zip(map(str, keys), (structured(c, value) for c in children), strict=True))
        case ("list", *children):
            return [structured(c, value) for c in children]
        case ("tuple", *children):
            return tuple(structured(c, value) for c in children)
    raise FxparError(f"the plan's output structure has an unknown part: {structure!r}")

