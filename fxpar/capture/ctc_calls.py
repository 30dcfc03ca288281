"""``torch.ctc_loss``, however it is reached, becomes our op of static shapes while a model is traced.

torch's op is refused by tracing: the shape of what it keeps for backward is that of the longest target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

MEAN, SUM = 1, 2


def length_tensor(lengths: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """``[n]``, int64."""
    given = lengths if isinstance(lengths, Tensor) else torch.tensor(list(lengths), dtype=torch.int64)
    return given.to(device=device, dtype=torch.int64).reshape(-1)


def padded(targets: Tensor, lengths: Tensor) -> Tensor:
    """``[n, s]`` of targets that come one after the other in ``[s]``; values beyond a sample's length are unused."""
    if targets.dim() != 1 or targets.shape[0] == 0:
        return targets.reshape(lengths.shape[0], -1)
    starts = lengths.cumsum(0) - lengths
    places = starts[:, None] + torch.arange(targets.shape[0], device=targets.device)
    return targets[places.clamp(max=targets.shape[0] - 1)]


def ctc_loss_call(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """The signature and the meaning of torch.ctc_loss."""
    batched = log_probs.dim() == 3
    scores = log_probs if batched else log_probs.unsqueeze(1)
    frames, labels = (length_tensor(lengths, scores.device) for lengths in (input_lengths, target_lengths))
    loss, _ = torch.ops.fxpar.ctc_loss(scores, padded(targets, labels), frames, labels, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == math.inf, 0.0, loss)
    if reduction == MEAN:
        return (loss / labels.clamp(min=1)).mean()
    if reduction == SUM:
        return loss.sum()
    return loss if batched else loss.squeeze(0)


@contextmanager
def ctc_intercepted() -> Iterator[None]:
    """For F.ctc_loss and nn.CTCLoss too: they call it."""
    original = torch.ctc_loss
    torch.ctc_loss = ctc_loss_call
    try:
        yield
    finally:
        torch.ctc_loss = original
