"""CTC losses of every form of targets, lengths and reduction become our op with the same loss and gradient."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fxpar.capture.ctc_calls import ctc_intercepted, ctc_loss_call
from tests.capture.equality import assert_equals_eager

torch.set_num_threads(1)
CLASSES = 6


@st.composite
def calls(draw):
    """(log probabilities, the other arguments); alignments that are impossible come up, as do empty targets."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    steps, samples, longest = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    blank = draw(st.sampled_from((0, 2, CLASSES - 1)))
    labels = torch.randint(CLASSES - 1, (samples, longest))
    labels = labels + (labels >= blank)
    frames, lengths = torch.randint(1, steps + 1, (samples,)), torch.randint(longest + 1, (samples,))
    log_probs = torch.randn(steps, samples, CLASSES, dtype=torch.float64).log_softmax(-1)
    form = draw(st.sampled_from(("padded", "one after the other", "unbatched")))
    if form == "unbatched":
        log_probs, labels, frames, lengths = log_probs[:, 0], labels[0, : int(lengths[0])], frames[0], lengths[0]
    elif form == "one after the other":
        labels = torch.cat([row[:n] for row, n in zip(labels, lengths, strict=True)])
    if draw(st.booleans()):
        labels = labels.int()
    if form != "unbatched" and draw(st.booleans()):
        frames, lengths = tuple(frames.tolist()), lengths.tolist()
    return log_probs, (labels, frames, lengths, blank, draw(st.sampled_from((0, 1, 2))), draw(st.booleans()))


def stepped(function, log_probs, rest):
    scores = log_probs.clone().requires_grad_()
    loss = function(scores, *rest)
    weights = torch.arange(1.0, loss.numel() + 1, dtype=loss.dtype).reshape(loss.shape)
    (gradient,) = torch.autograd.grad(loss, scores, weights)
    return loss.detach(), gradient


@settings(max_examples=200)
@given(calls())
def test_equals_torch(call):
    for got, want in zip(stepped(ctc_loss_call, *call), stepped(torch.ctc_loss, *call), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, equal_nan=True)


class Recogniser(nn.Module):
    """What hides the op: a functional, a module, or torch's function itself."""

    def __init__(self, form, reduction="mean"):
        super().__init__()
        self.scores, self.form = nn.Linear(5, CLASSES), form
        self.criterion = nn.CTCLoss(reduction=reduction, zero_infinity=True)

    def forward(self, x, targets, frames, lengths):
        log_probs = self.scores(x).log_softmax(-1)
        if self.form == "module":
            return self.criterion(log_probs, targets, frames, lengths).mean()
        if self.form == "function":
            return torch.ctc_loss(log_probs, targets, frames, lengths, 1, 2, True)
        if self.form == "numbers":
            return F.ctc_loss(log_probs, targets, (9, 7, 8), (4, 0, 2))
        return F.ctc_loss(log_probs, targets.flatten()[:6], frames, lengths, reduction="sum")


@pytest.mark.parametrize("form", ["module", "function", "numbers", "one after the other"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_captured_step_equals_eager(form, reduction):
    torch.manual_seed(0)
    call = (torch.randn(9, 3, 5), torch.randint(2, CLASSES, (3, 4)), torch.tensor([9, 2, 8]), torch.tensor([3, 2, 1]))
    assert_equals_eager(Recogniser(form, reduction), call, {})


def test_interception_ends():
    original = torch.ctc_loss
    with ctc_intercepted():
        assert torch.ctc_loss is ctc_loss_call
    assert torch.ctc_loss is original
