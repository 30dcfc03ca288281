"""Expert modules of transformers become our whole experts op while they are traced.

transformers sends every module that ``use_experts_implementation`` decorates through one interface: (tokens [t, d],
expert of each slot [t, k], weight of each slot [t, k]) -> [t, d]. Its kernels sort all slots of the batch by expert, an
order that no mesh axis could cut. A module whose experts are the plain gated or ungated MLP is replaced; any other (a
bias, a norm after the experts, a gate of its own) is left to be captured as it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

import fxpar.rules.ops.experts  # noqa: F401  registers the op

_INTERFACE = "transformers.integrations.moe"
_FLAGS = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "act_fn")


def activation_of(module: object) -> str | None:
    """The name in ``ACTIVATIONS`` of an activation module, None when it is none of these."""
    if type(module) is nn.SiLU or _is_transformers(module, "SiLUActivation"):
        return "silu"
    if type(module) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}[module.approximate]
    if _is_transformers(module, "GELUActivation"):
        return "gelu"
    if _is_transformers(module, "GELUTanh"):
        return "gelu_tanh"
    if type(module) is nn.ReLU:
        return "relu"
    return "relu2" if _is_transformers(module, "ReLUSquaredActivation") else None


def _is_transformers(module: object, name: str) -> bool:
    kind = type(module)
    return kind.__name__ == name and kind.__module__ == "transformers.activations"


def is_plain(module: nn.Module) -> bool:
    """True when the module's experts are what ``fxpar::experts`` computes."""
    interface: Any = sys.modules.get(_INTERFACE)
    if interface is None or not all(hasattr(module, flag) for flag in _FLAGS):
        return False
    module_: Any = module
    up = "gate_up_proj" if module_.has_gate else "up_proj"
    weights = [getattr(module_, name, None) for name in (up, "down_proj")]
    return (
        not (module_.has_bias or module_.has_post_expert_norm or getattr(module_, "_is_expert_parallel", False))
        and getattr(type(module), "_apply_gate", None) is interface._default_apply_gate
        and activation_of(module_.act_fn) is not None
        and all(isinstance(w, Tensor) and w.dim() == 3 and w.shape[0] == module_.num_experts for w in weights)
    )


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The signature of a transformers experts module."""
    up = self.gate_up_proj if self.has_gate else self.up_proj
    down = self.down_proj
    if self.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    out = torch.ops.fxpar.experts(
        hidden_states.to(up.dtype), top_k_index, top_k_weights, up, down, self._fxpar_activation, self.has_gate,
        self.num_experts, (),
    )  # fmt: skip
    return out.to(hidden_states.dtype)


@contextmanager
def experts_replaced(model: nn.Module) -> Iterator[None]:
    """The plain expert modules of ``model`` call ``fxpar::experts`` for the duration."""
    changed: list[nn.Module] = []
    try:
        for module in model.modules():
            if "forward" not in module.__dict__ and is_plain(module):
                changed.append(module)
                module.__dict__["_fxpar_activation"] = activation_of(module.act_fn)
                module.__dict__["forward"] = MethodType(experts_forward, module)
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"], module.__dict__["_fxpar_activation"]
