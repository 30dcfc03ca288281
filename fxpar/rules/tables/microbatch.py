"""One microbatch's part of a whole: the batch itself stays whole, its parts would be other ranks'."""

from __future__ import annotations

from fxpar.rules.factor_rule import Call, Factors
from fxpar.rules.groups import loop, passes
from fxpar.rules.ops import microbatch as microbatch_ops
from fxpar.rules.registry import rule

__all__ = ["microbatch_ops"]


def microbatch(call: Call) -> Factors:
    """Every dim but the one that is cut."""
    groups = tuple(
        g for d, size in enumerate(call.shape(0)) if d != call.arg("dim") for g in loop(call, size, {0: d}, {0: d})
    )
    return Factors(groups, passes(call, "0"))


rule("fxpar::microbatch", microbatch)
