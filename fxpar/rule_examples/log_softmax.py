"""The parts of a log_softmax whose dim may be split."""

from __future__ import annotations

from fxpar.rule_examples.draw import Draw, calls
from fxpar.rules.soundness import Example, example


@calls("fxpar::sum_exp")
def summed(draw: Draw) -> Example:
    x, dim = draw.real(*draw.sizes(4, 3, 6)), draw.pick(0, 1, -1)
    return example("fxpar::sum_exp", x, x.amax(dim, keepdim=True), dim)


@calls("fxpar::log_probs")
def log_probs(draw: Draw) -> Example:
    x, dim = draw.real(*draw.sizes(4, 3, 6)), draw.pick(0, 1, -1)
    top = x.amax(dim, keepdim=True)
    return example("fxpar::log_probs", x, top, (x - top).exp().sum(dim, keepdim=True))


@calls("fxpar::log_probs_backward")
def log_probs_backward(draw: Draw) -> Example:
    grad, dim = draw.real(*draw.sizes(4, 3, 6)), draw.pick(0, 1, -1)
    output = draw.real(*grad.shape).log_softmax(dim)
    return example("fxpar::log_probs_backward", grad, output, grad.sum(dim, keepdim=True))
