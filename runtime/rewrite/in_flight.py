"""Bound what gradient reductions hold while they are under way.

Nothing in backward reads a reduced gradient, so each reduction would end where backward does and hold what it reduces
until then: the whole gradient of every parameter, also where parameters are stored in shards. Before one more is
issued, the oldest are waited for until what is under way is within a limit:

    g1 = reduce_scatter(p1); g2 = reduce_scatter(p2); p3 = mm(x, y); g3 = reduce_scatter(p3)
    ->
    g1 = reduce_scatter(p1); g2 = reduce_scatter(p2); p3 = mm(x, y); wait(g1); g3 = reduce_scatter(p3)

Compute stands still only where it is ahead of the link by more than that. Runs last: other passes move collectives.
Sizes are those of the largest rank, so that every rank waits at the same places.
"""

from __future__ import annotations

from dataclasses import replace

from fxpar.runtime.local import AnyStep, CollectiveStep, LocalProgram, WaitStep
from fxpar.runtime.rewrite.bucket import free_reductions

#: Bytes of reductions under way at most, unless two are more: one travels while the operand of the next is made.
IN_FLIGHT_BYTES = 512 * 2**20


def bound_reductions(local: LocalProgram, limit: int = IN_FLIGHT_BYTES) -> LocalProgram:
    """``local`` with waits, so that the reductions under way whose results no op reads are at most two, or their full
    tensors hold at most ``limit`` bytes."""
    free = free_reductions(local)
    flight: list[CollectiveStep] = []
    steps: list[AnyStep] = []
    for step in local.steps:
        if isinstance(step, CollectiveStep) and id(step) in free:
            # forward's end with their half; one that this one reads ends here
            flight = [s for s in flight if s.phase == step.phase and set(step.reads).isdisjoint(s.outputs)]
            while len(flight) > 1 and sum(s.bytes for s in (*flight, step)) > limit:
                steps.append(WaitStep(flight.pop(0).outputs, step.phase))
            flight.append(step)
        steps.append(step)
    return replace(local, steps=tuple(steps))
