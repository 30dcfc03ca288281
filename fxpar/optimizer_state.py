"""How many bytes an optimizer keeps for every parameter, measured.

In go a ModelSource and its parameters (their shapes and dtypes; they may be on meta); out comes an OptimizerState for
each that is trained. The optimizer is stepped on small real parameters and what it then holds is counted, so a fused,
8-bit or home-made optimizer needs no table here.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from fxpar.model_source import ModelSource, call_user
from fxpar.plans.errors import FxparError, UnsupportedError

# Sizes of the stand-ins' dims: different on every dim, so that a state which has lost a dim (a factored second
# moment) is never taken for one of the parameter's shape.
STAND_IN_SIZES = (3, 4, 5, 6, 7)


@dataclass(frozen=True)
class OptimizerState:
    """State of one parameter: `bytes_per_element` times its elements, plus `fixed_bytes` (a step counter)."""

    bytes_per_element: int
    fixed_bytes: int

    def bytes_for(self, elements: int) -> int:
        """Bytes of the state of a parameter, or of one rank's part of it, with that many elements."""
        return self.bytes_per_element * elements + self.fixed_bytes


def optimizer_state_bytes(
    source: ModelSource, parameters: Iterable[tuple[str, torch.Tensor]] | None = None
) -> dict[str, OptimizerState]:
    """Measure the state of every parameter that is trained, by name.

    Args:
        source: gives the optimizer.
        parameters: `model.named_parameters()`; only shape, dtype and requires_grad are read. Default: those of
            `source.build()` on meta.

    Raises:
        UnsupportedError: the state is neither of the parameter's shape nor one number (Adafactor, LBFGS): it cannot
            be cut as the parameter is.
        FxparError: the optimizer raised; shows the user's line.
    """
    if parameters is None:
        with torch.device("meta"):
            parameters = list(source.build().named_parameters())
    kind_of = {name: stand_in_kind(p) for name, p in parameters if p.requires_grad}
    if not kind_of:
        return {}
    # One stand-in of each kind is stepped, however many parameters the model has.
    stand_ins = {
        (shape, dtype): torch.nn.Parameter(torch.ones(shape, dtype=dtype, device="cpu"))
        for shape, dtype in sorted(set(kind_of.values()), key=str)
    }

    def step_twice() -> torch.optim.Optimizer:
        optimizer = source.optimizer(list(stand_ins.values()))
        # Twice, since some optimizers make a state only when they first need it (SGD's momentum).
        for _ in range(2):
            for p in stand_ins.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
        return optimizer

    try:
        optimizer = call_user(step_twice, "the optimizer", Path(source.path))
    except FxparError as error:
        raise FxparError(
            "the optimizer cannot be stepped on small parameters to measure its state",
            where=error.where,
            numbers=(error.what, *error.numbers),
            way_out="define optimizer(params) in model.py so that it takes a list of parameters",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FxparError(
            f"optimizer(params) of {source.name} returned a {type(optimizer).__name__}",
            way_out="return a torch.optim.Optimizer",
        )
    measured = {kind: measure(optimizer, p) for kind, p in stand_ins.items()}
    return {name: measured[kind] for name, kind in kind_of.items()}


def optimizer_bytes_of(source: ModelSource, parameters: list[tuple[str, torch.Tensor]]) -> Callable[[str, str], int]:
    """(dtype, name) -> bytes per element that the optimizer keeps of a parameter; 0 of what it does not step. Raises
    what :func:`optimizer_state_bytes` raises."""
    state = optimizer_state_bytes(source, parameters)
    return lambda dtype, name: state[name].bytes_per_element if name in state else 0


def stand_in_kind(parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the small parameter that stands for this one: sizes 0 and 1 stay what they are."""
    small = (STAND_IN_SIZES[dim % len(STAND_IN_SIZES)] for dim in range(parameter.dim()))
    shape = tuple(size if size < 2 else other for size, other in zip(parameter.shape, small, strict=True))
    return shape, parameter.dtype


def measure(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> OptimizerState:
    """Bytes that the optimizer holds for this parameter."""
    per_element = fixed = 0
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.shape == parameter.shape and parameter.dim() > 0:
            per_element += value.element_size()
        elif math.prod(value.shape) <= 1:
            fixed += value.numel() * value.element_size()
        else:
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps a state that is not shaped as its parameter: {key}",
                numbers=f"a parameter of shape {tuple(parameter.shape)} has {key} of shape {tuple(value.shape)}",
                way_out="use an elementwise optimizer: SGD, Adam, AdamW, RMSprop, Adagrad",
            )
    return OptimizerState(per_element, fixed)
