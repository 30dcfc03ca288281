"""The parts of a log_softmax whose dim may be split (see :mod:`fxpar.rules.ops.log_softmax`)."""

from __future__ import annotations

from fxpar.rules.factor_rule import Call, Factors, Group
from fxpar.rules.groups import loop
from fxpar.rules.ops import log_softmax  # noqa: F401  registers the ops
from fxpar.rules.registry import rule
from fxpar.rules.tables.pointwise import pointwise


def sum_exp(call: Call) -> Factors:
    """``dim`` runs in ``x`` alone and is summed; the other dims are loops of all."""
    summed = call.arg("dim") % max(len(call.shape(0)), 1)
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)):
        if d == summed:
            groups += loop(call, size, {0: d}, {}, contract={0: "sum"})
        else:
            groups += loop(call, size, {0: d, 1: d}, {0: d})
    return Factors(groups)


rule("fxpar::sum_exp", sum_exp)
rule("fxpar::log_probs", pointwise())
rule("fxpar::log_probs_backward", pointwise(("02",)))
