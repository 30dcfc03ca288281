"""What solving returns: a status, the choices, and how good they are proven to be."""

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from fxpar.solver.warm import Start


class Status(Enum):
    """OPTIMAL: cost == bound. FEASIBLE: an assignment, with a proven gap. INFEASIBLE: proven that none exists.
    UNKNOWN: the effort ran out before an assignment or a proof was found."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Solution:
    """The outcome of solving a Problem.

    assignment  one state per variable, or None.
    cost        ns, a recount of `assignment`; None without one.
    bound       ns; no feasible assignment costs less. Meaningless (0) when INFEASIBLE.
    memory      memory units used by `assignment`; None without one.
    gap         (cost - bound) / cost, None without an assignment.
    multiplier  ns per memory unit: the price of memory at which the bound was found; 0 when the row does not bind.
    start       messages for the next solve of this problem, or of one that differs in budget, memory or, a
                little, in cost; None where no messages were passed.
    min_memory  the smallest memory found, in memory units, where nothing fitting the budget was found; else None.
    """

    status: Status
    assignment: tuple[int, ...] | None
    cost: int | None
    bound: int
    memory: int | None
    gap: float | None
    multiplier: Fraction
    min_memory: int | None
    start: Start | None = None
