"""How long one replayed local program takes."""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.plans.plan import CollectiveTotal


@dataclass(frozen=True)
class Timeline:
    """Result of replaying one local program: ns of the step, of compute, of all and of exposed communication."""

    step_ns: int
    compute_ns: int
    communication_ns: int
    totals: tuple[CollectiveTotal, ...]

    @property
    def exposed_ns(self) -> int:
        return self.step_ns - self.compute_ns
