"""Capture: a model, its example call and its loss -> one Program (forward and backward, global shapes, no torch)."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from fxpar.capture.outputs import LossFunction
from fxpar.plans.program import Program

__all__ = ["capture"]


def capture(
    source_model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    loss: LossFunction | None = None,
    train: bool = True,
    outputs: Literal["loss", "all"] = "loss",
) -> Program:
    """Trace one training step of a model on its example inputs.

    Args:
        source_model: on the CPU or the meta device; unchanged afterwards (names, values, modes, wrappers).
        args, kwargs: an example call with the GLOBAL batch; the program holds exactly these shapes.
        loss: ``loss(output, (args, kwargs))`` -> scalar; without it the output's ``loss`` (attribute or key), or the
            output itself.
        train: with backward; False traces ``model.eval()``'s forward only.
        outputs: ``"all"`` also returns every tensor of the model's output, detached.

    Returns:
        The simplified program: outputs are loss, further outputs, new buffers, gradients.

    Raises:
        CaptureError: the model cannot become one graph; names the user's line and a way out.
    """
    from fxpar.capture.repeated_layers import trace_repeated
    from fxpar.capture.trace import trace

    args, kwargs, keep_output = tuple(args), dict(kwargs), outputs == "all"

    def whole(model: nn.Module) -> Program:
        return trace(model, args, kwargs, loss=loss, train=train, keep_output=keep_output)

    short = trace_repeated(source_model, args, kwargs, whole, loss=loss, train=train, keep_output=keep_output)
    return whole(source_model) if short is None else short
