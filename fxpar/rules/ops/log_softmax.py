"""``log_softmax`` in three parts, so that the softmaxed dim (a vocabulary) may be split over ranks.

    top   = amax(x, dim)                          pending maximum where dim is split
    total = fxpar::sum_exp(x, top, dim)           sum exp(x - top), a pending sum where dim is split
    out   = fxpar::log_probs(x, top, total)       x - top - log(total), elementwise

    d x   = fxpar::log_probs_backward(grad, out, s) = grad - exp(out) * s,   s = sum(grad, dim)

``top``, ``total`` and ``s`` keep ``dim`` with size 1. Each of ours is one pass over the data, without temporaries of
its size on the way out.
"""

from __future__ import annotations

from torch import Tensor

from fxpar.rules.ops.random import LIBRARY

LIBRARY.define("sum_exp(Tensor x, Tensor top, int dim) -> Tensor")
LIBRARY.define("log_probs(Tensor x, Tensor top, Tensor total) -> Tensor")
LIBRARY.define("log_probs_backward(Tensor grad, Tensor output, Tensor total) -> Tensor")


def sum_exp(x: Tensor, top: Tensor, dim: int) -> Tensor:
    """``[..., 1, ...]``: the sum of ``exp(x - top)`` along ``dim``."""
    return (x - top).exp_().sum(dim, keepdim=True)


def log_probs(x: Tensor, top: Tensor, total: Tensor) -> Tensor:
    """``x - top - log(total)``, in the shape of ``x``."""
    return (x - top).sub_(total.log())


def log_probs_backward(grad: Tensor, output: Tensor, total: Tensor) -> Tensor:
    """``grad - exp(output) * total``."""
    return output.exp().mul_(total).neg_().add_(grad)


for _name, _function in (("sum_exp", sum_exp), ("log_probs", log_probs), ("log_probs_backward", log_probs_backward)):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
