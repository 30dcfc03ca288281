"""transformers records router logits, hidden states and attentions by hooks that it installs in the first forward.

It does so behind a lock, which dynamo cannot enter; here they are installed before the model is traced. They do nothing
until a forward asks for what they record, and they are what that forward would have left on the model.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_CAPTURING = "transformers.utils.output_capturing"


def install_recorders(model: nn.Module) -> None:
    """Install the hooks of every transformers model in ``model`` whose configuration asks for recorded outputs."""
    capturing: Any = sys.modules.get(_CAPTURING)
    if capturing is None:
        return
    for module in model.modules():
        configuration = getattr(module, "config", None)
        if configuration is None or not hasattr(module, "get_input_embeddings"):
            continue
        keys = capturing._CAN_RECORD_REGISTRY.get(module) or {}
        if any(getattr(configuration, f"output_{key}", False) for key in keys):
            capturing.maybe_install_capturing_hooks(module)
