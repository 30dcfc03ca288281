"""The shapes that a search weighed, for people."""

from __future__ import annotations

from fxpar.plans.plan import Considered, Plan
from fxpar.show import GIB, ms, table


def search_text(plan: Plan) -> str:
    """What ``fxpar show --search`` prints: shapes searched in full first, then by their estimates."""
    if not plan.considered:
        return ("the mesh was asked for: no others were weighed"
                if len(plan.candidates) <= 1 else "no shapes were weighed; see `fxpar show` for the plans compared")
    head = ("stages x data x tensor", "microbatches", "estimate", "memory", "step", "")
    rows = [head, *map(_row, plan.considered)]
    return "\n".join([
        f"{len(plan.considered)} shapes weighed for {plan.cluster}; estimates from a few layers, steps simulated",
        *table(rows),
    ])


def _row(c: Considered) -> tuple[str, ...]:
    return (
        f"{c.pp} x {c.dp} x {c.tp}", str(c.microbatches), ms(c.estimated_ns), f"{c.estimated_bytes / GIB:.1f} GiB",
        "" if c.step_ns is None else ms(c.step_ns), c.lost or "chosen",
    )
