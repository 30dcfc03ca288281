"""One training step of a program in names: which tensor is which program input, and what its outputs are called.

In goes a program, a model and an example call; out come tensors by value id for the interpreters, and their results
as loss, gradients, buffers and outputs by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fxpar.plans.program import Arg, Program
from fxpar.runtime.binding import bind
from fxpar.runtime.interpret import constant_tensor, torch_dtype


@dataclass(frozen=True)
class StepResults:
    """Results of one step, whole (global) tensors on the CPU.

    Attributes:
        loss: a scalar.
        gradients: by every name of every parameter (tied ones too); None where there is none.
        buffers: all buffers of the model after the step, by every name.
        outputs: the tensors of the model's output in pytree order; of a program that returns the loss alone, that.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    outputs: tuple[torch.Tensor, ...] = field(default=())


def input_values(
    program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, seed: int
) -> dict[int, torch.Tensor]:
    """The global tensor of every program input, by value id.

    Args:
        model: holds the parameters and buffers, in the program's dtypes.
        args, kwargs: the call with the global batch, in the program's dtypes.
        seed: of this step's random numbers.

    Raises:
        FxparError: the call is not the one the program was captured with.
    """
    tensors = {
        **dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False)),
    }
    found = bind(program, args, kwargs)
    for entry in program.inputs:
        kind = program.types[entry.value]
        if entry.kind in ("parameter", "buffer"):
            found[entry.value] = tensors[entry.name].detach()
        elif entry.kind == "constant":
            found[entry.value] = constant_tensor(program.constants[int(entry.name)])
        elif entry.kind == "tangent":
            found[entry.value] = torch.ones(kind.shape, dtype=torch_dtype(kind.dtype))
        elif entry.kind == "seed":
            found[entry.value] = torch.tensor(seed, dtype=torch.int64)
    return found


def named_results(program: Program, model: nn.Module, outputs: Sequence[torch.Tensor]) -> StepResults:
    """A program's outputs by name; what it does not write (a gradient, a buffer) is None or the model's own."""
    ties = {entry.name: (entry.name, *entry.ties) for entry in program.inputs}
    gradients: dict[str, torch.Tensor | None] = dict.fromkeys(n for n, _ in named_parameters(model))
    buffers = {n: b.detach().clone() for n, b in model.named_buffers(remove_duplicate=False)}
    loss: torch.Tensor | None = None
    for entry, tensor in zip(program.outputs, outputs, strict=True):
        if entry.kind == "loss":
            loss = tensor
        for name in ties.get(entry.name, (entry.name,)):
            if entry.kind == "gradient":
                gradients[name] = tensor
            elif entry.kind == "buffer":
                buffers[name] = tensor
    assert loss is not None  # a plan without one is not readable
    return StepResults(loss, gradients, buffers, output_tensors(program, outputs))


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every name of every parameter."""
    return list(model.named_parameters(remove_duplicate=False))


def output_tensors(program: Program, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors of the model's output in pytree order, as far as the program returns them."""
    return tuple(outputs[index] for index in output_positions(program.structure))


def returns_outputs(program: Program) -> bool:
    """True when the program returns more of the model's output than the loss."""
    return any(o.kind == "output" for o in program.outputs)


def output_positions(structure: Arg) -> Iterator[int]:
    """Positions among a program's outputs that an output structure names, left to right."""
    match structure:
        case ("value", int(index)):
            yield index
        case ("const", _) | None:
            return
        case ("dict", tuple(), *children) | ("object", str(), tuple(), *children) | (("list" | "tuple"), *children):
            for child in children:
                yield from output_positions(child)


def draws_random_numbers(program: Program) -> bool:
    """True when a step depends on a seed."""
    return any(entry.kind == "seed" for entry in program.inputs)


def output_tensors_of_call(output: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of what a parallel model returned, in pytree order."""
    if isinstance(output, torch.Tensor):
        return (output,)
    if isinstance(output, dict):
        output = list(output.values())
    return tuple(t for part in output for t in output_tensors_of_call(part)) if isinstance(output, list | tuple) else ()
