"""Losses kept as one op. With a sum over samples a split leaves a pending sum; a mean over samples stays whole, because
its count is global (capture writes means as sums over counts)."""

from __future__ import annotations

from fxpar.rules.factor_rule import Call, Factors, Group, Linear
from fxpar.rules.groups import loop, passes
from fxpar.rules.ops import ctc as ctc_ops  # noqa: F401  registers the ops
from fxpar.rules.registry import rule
from fxpar.rules.tables.pointwise import broadcast_groups

NONE, MEAN, SUM = 0, 1, 2


def nll(call: Call) -> Factors:
    """``[n, c!, ...]`` against ``[n, ...]``; also ``[c!]`` against a scalar."""
    rank = len(call.shape(0))
    classes = 1 if rank > 1 else 0
    reduction = call.arg("reduction")
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)):
        if d == classes or reduction == MEAN:
            continue
        at = d if d < classes else d - 1
        inputs = {0: d, 1: at}
        if reduction == NONE:
            # the total weight is the batch's only when something is reduced
            groups += loop(call, size, inputs, {0: at}, nonempty=True)
        else:
            groups += loop(call, size, inputs, {}, contract={0: "sum", 1: "sum"}, nonempty=True)
    # the total weight does not read the scores
    return Factors(groups, passes(call, "0>0"))


def nll_backward(call: Call) -> Factors:
    """The total weight is an operand, so even a mean splits; linear in the gradient."""
    rank = len(call.shape(1))
    classes = 1 if rank > 1 else 0
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(1)):
        if d != classes:
            at = d if d < classes else d - 1
            carried = {0: at} if len(call.shape(0)) > at else {}
            groups += loop(call, size, {1: d, 2: at, **carried}, {0: d}, nonempty=True)
    # of the scores only the shape is read
    return Factors(groups, passes(call, "0", "1>"))


rule(["nll_loss_forward", "nll_loss2d_forward"], nll)
rule(["nll_loss_backward", "nll_loss2d_backward"], nll_backward)


def elementwise_loss(call: Call) -> Factors:
    """``reduction`` none: elementwise; sum: contracted; mean: whole."""
    reduction = call.arg("reduction")
    if reduction == NONE:
        return Factors(broadcast_groups(call))
    if reduction != SUM or any(t.shape != call.shape(0) for t in call.inputs):
        return Factors()
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)):
        groups += loop(call, size, dict.fromkeys(range(len(call.inputs)), d), {}, contract={0: "sum"})
    return Factors(groups)


rule(
    ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
     "soft_margin_loss"],
    elementwise_loss,
)  # fmt: skip


def elementwise_loss_backward(call: Call) -> Factors:
    """A mean divides by the local number of elements: whole. Otherwise elementwise, linear in the gradient."""
    entries = passes(call, "0")
    return Factors(broadcast_groups(call) if call.arg("reduction") != MEAN else (), entries)


rule(
    ["mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward",
     "soft_margin_loss_backward"],
    elementwise_loss_backward,
)  # fmt: skip


def ctc(call: Call) -> Factors:
    """Whole: the width of ``log_alpha`` is that of the longest target of the batch, a rank's samples may have less."""
    return Factors()


rule("_ctc_loss.Tensor", ctc)


def ctc_backward(call: Call) -> Factors:
    """``grad [n], log_probs [t!, n, c!], targets, lengths, lengths, loss [n], log_alpha [n, ...]``."""
    linear = (Linear((0,), (0,)),)
    if len(call.shape(1)) != 3 or len(call.shape(2)) != 2 or len(call.inputs) < 7:
        return Factors((), linear)
    places = {1: 1, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0}
    if call.shape(0):
        places[0] = 0
    return Factors(loop(call, call.shape(1)[1], places, {0: 1}, nonempty=True), linear)


rule("_ctc_loss_backward.Tensor", ctc_backward)

rule("fxpar::ctc_loss", "t! n c!, n s!, n, n -> n, n t! a!")
rule("fxpar::ctc_loss_backward", "n, t! n c!, n s!, n, n, n, n t! a! -> t! n c!", linear=("0",))
