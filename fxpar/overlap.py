"""The bound that no schedule beats.

With one stream of compute and one of communication a step is never shorter than its compute, nor than its
communication, so never than w x compute + (1 - w) x communication for any w from 0 to 1. The least such mixture over
all plans, at the best w, bounds the step of every plan however well it overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from fxpar.plans.layout import Dims
from fxpar.plans.reshard import COLLECTIVES, StepKind
from fxpar.prices import Prices
from fxpar.reshard_tables import KnownPairs, PriceKind
from fxpar.rules.choices import JointChoice, Site
from fxpar.solver.certificate import Proof
from fxpar.solver.problem import FORBIDDEN, IntArray, Problem
from fxpar.solver.prove import prove

QUARTERS = 4
#: Sweeps of message passing for one mixture.
SWEEPS = 25


@dataclass(frozen=True, eq=False)
class CommunicationPrices(Prices):
    """Prices of collectives alone: ops and the local copies of reshards are free. ``whole``: the prices that these are
    a part of; what it knows of reshards is taken from there."""

    whole: Prices | None = None

    def op_ns(self, site: Site, choice: JointChoice) -> int:
        """0."""
        return 0

    def move_ns(self, kind: StepKind, axis: int, elements: int, dtype: str, shared: bool = False) -> int:
        """Time of a collective; 0 for local steps."""
        return super().move_ns(kind, axis, elements, dtype, shared) if kind in COLLECTIVES else 0

    def pairs(self, dims: Dims, dtype: str, priced: PriceKind) -> tuple[KnownPairs, bool]:
        """Those of ``whole``, without what is no communication."""
        if self.whole is None:
            return super().pairs(dims, dtype, priced)
        return self.whole.pairs(dims, dtype, priced)[0], True


def mixture(whole: Problem, communication: Problem, quarters: int) -> Problem:
    """The problem whose costs are ``quarters`` x compute + (4 - ``quarters``) x communication.

    Args:
        whole: priced with both. communication: the same problem priced with CommunicationPrices.

    Raises:
        ValueError: they are not the same problem.
    """
    shapes = [[t.shape for t in p.tables] for p in (whole, communication)]
    if whole.edges != communication.edges or shapes[0] != shapes[1]:
        raise ValueError("the problems do not have the same pairs")

    def mix(both: IntArray, sent: IntArray) -> IntArray:
        barred = both >= FORBIDDEN
        sent = np.where(barred, 0, sent)
        return np.where(barred, both, quarters * (np.where(barred, 0, both) - sent) + (QUARTERS - quarters) * sent)

    variables = tuple(
        replace(a, costs=mix(a.costs, b.costs))
        for a, b in zip(whole.variables, communication.variables, strict=True)
    )
    tables = tuple(mix(a, b) for a, b in zip(whole.tables, communication.tables, strict=True))
    return Problem(variables, whole.edges, tables, whole.budget)


def overlap_bound(
    whole: Problem, communicate: Callable[[], Problem], multiplier: Fraction
) -> tuple[int, Proof, int] | None:
    """(quarters of compute, proof of the mixture, 4 x the bound in ns) of the best mixture; None when nothing is
    feasible. The bound is concave in the quarters: from mostly compute downwards it is followed while it rises.

    Args:
        communicate: makes the problem priced with CommunicationPrices.
        multiplier: the price of memory in ``whole``.
    """
    communication = communicate()
    best: tuple[int, Proof, int] | None = None
    for quarters in range(QUARTERS, -1, -1):
        mixed = mixture(whole, communication, quarters)
        found = prove(mixed, multiplier * quarters, sweeps=SWEEPS)
        if found is None:
            return None
        if best is not None and found[1] <= best[2]:
            break
        best = (quarters, *found)
    return best
