"""``fxpar::ctc_loss`` and ``fxpar::ctc_loss_backward``: the losses of sequences without alignment, sample by sample.

    log_probs [t, n, c]    targets [n, s] (padded)    input_lengths, target_lengths [n]
    loss [n] = -log of the sum over alignments    alpha [n, t, 2s + 1]: log of the forward variables

torch's own op gives ``alpha`` the width of the longest target of the batch: a shape that depends on values, and that
differs between the ranks of a split batch. Here it has the width of the padding; what a sample does not reach is -inf.
Formulas: Graves et al., Connectionist Temporal Classification (2006), section 4.1; computed by torch's kernels, in
float32 at least.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fxpar.rules.ops.attention import wide
from fxpar.rules.ops.random import LIBRARY

LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "Tensor loss, Tensor alpha, int blank, bool zero_infinity) -> Tensor"
)


def states(targets: Tensor) -> int:
    """Labels with a blank before, between and after them."""
    return 2 * targets.shape[1] + 1


def reached(alpha: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """``[n, t, width]``: True where the sample has that step and that state."""
    steps = torch.arange(alpha.shape[1], device=alpha.device)[:, None] < input_lengths[:, None, None]
    labels = torch.arange(alpha.shape[2], device=alpha.device) <= 2 * target_lengths[:, None, None]
    return steps & labels


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """(loss, alpha); see the module's docstring."""
    values = log_probs.to(wide(log_probs.dtype))
    alpha = values.new_full((targets.shape[0], log_probs.shape[0], states(targets)), -math.inf)
    if not alpha.numel():
        return log_probs.new_zeros(targets.shape[0]), alpha
    loss, found = torch.ops.aten._ctc_loss.Tensor(
        values, targets.contiguous(), input_lengths, target_lengths, blank, zero_infinity
    )
    known = reached(found, input_lengths, target_lengths)
    alpha[:, :, : found.shape[2]] = torch.where(known, found, -math.inf)
    return loss.to(log_probs.dtype), alpha


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Gradient of ``log_probs`` from that of ``loss``. As torch's, it takes ``exp(log_probs)`` to sum to 1 over c."""
    if not log_probs.numel():
        return log_probs.new_zeros(log_probs.shape)
    dtype = wide(log_probs.dtype)
    longest = int(target_lengths.max())
    slope: Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        grad.to(dtype).contiguous(), log_probs.to(dtype), targets.contiguous(), input_lengths, target_lengths,
        loss.to(dtype), alpha[:, :, : 2 * longest + 1].contiguous(), blank, zero_infinity,
    )  # fmt: skip
    return slope.to(log_probs.dtype).contiguous()


def _shape(log_probs: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    samples = targets.shape[0]
    alpha = log_probs.new_empty(samples, log_probs.shape[0], states(targets), dtype=wide(log_probs.dtype))
    return log_probs.new_empty(samples), alpha


def _backward_shape(grad: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, blank, zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (blank, zero_infinity)


def _gradient(ctx: Any, grad: Tensor, grad_alpha: Tensor | None) -> tuple:
    return torch.ops.fxpar.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 5


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("ctc_loss", ctc_loss, _key)
    LIBRARY.impl("ctc_loss_backward", ctc_loss_backward, _key)
torch.library.register_fake("fxpar::ctc_loss", _shape, lib=LIBRARY)
torch.library.register_fake("fxpar::ctc_loss_backward", _backward_shape, lib=LIBRARY)
torch.library.register_autograd("fxpar::ctc_loss", _gradient, setup_context=_save, lib=LIBRARY)
