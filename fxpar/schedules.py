"""Pipeline schedules by name, in torch's order: GPipe, 1F1B, interleaved 1F1B, interleaved zero bubble, ZBV, DualPipeV.

In go the numbers of ranks, stages and microbatches; out comes a :class:`fxpar.plans.schedule.Schedule` with every send,
receive, gathering and reduction. A schedule is one row of the table below.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.plans.errors import FxparError
from fxpar.plans.schedule import Schedule, schedule_problems


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of torch: the class that orders it, and how many stages a rank has in it (None: two or more)."""

    torch_class: str
    stages_per_rank: int | None
    v_shaped: bool = False
    splits_backward: bool = False


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind("ScheduleGPipe", 1),
    "1f1b": ScheduleKind("Schedule1F1B", 1),
    "interleaved": ScheduleKind("ScheduleInterleaved1F1B", None),
    "zero-bubble": ScheduleKind("ScheduleInterleavedZeroBubble", None, splits_backward=True),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleKind("ScheduleDualPipeV", 2, v_shaped=True, splits_backward=True),
}


def stages_per_rank(name: str, wanted: int | None = None) -> int:
    """How many stages each rank has: ``wanted``, where the schedule leaves that open (2 unless said).

    Raises:
        FxparError: no such schedule, or it has another number.
    """
    kind = kind_of(name)
    if kind.stages_per_rank is None:
        if wanted is not None and wanted < 1:
            raise FxparError(f"a rank cannot have {wanted} stages", way_out="give --stages-per-rank 1 or more")
        return wanted or 2
    if wanted not in (None, kind.stages_per_rank):
        raise FxparError(
            f"the schedule {name} has {kind.stages_per_rank} stage{'s' * (kind.stages_per_rank > 1)} per rank, "
            f"not {wanted}", way_out="leave the number out, or take interleaved or zero-bubble",
        )
    return kind.stages_per_rank


def kind_of(name: str) -> ScheduleKind:
    """The row of the table.

    Raises:
        FxparError: there is none.
    """
    if name not in SCHEDULES:
        raise FxparError(f"there is no schedule '{name[:40]}'", way_out=f"one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def make_schedule(name: str, ranks: int, microbatches: int, per_rank: int | None = None) -> Schedule:
    """The schedule of ``name`` for a pipeline of ``ranks`` ranks with ``per_rank`` stages each.

    Raises:
        FxparError: no such schedule, or it does not exist for these numbers.
    """
    from fxpar.runtime.torch_pipelining import compute_order, with_communication

    kind = kind_of(name)
    stages = ranks * stages_per_rank(name, per_rank)
    try:
        order = compute_order(kind.torch_class, ranks, stages, microbatches, v_shaped=kind.v_shaped)
        lowered = with_communication(order, stages, microbatches)
    except (ValueError, AssertionError) as error:
        raise FxparError(
            f"there is no schedule {name} of {ranks} ranks, {stages} stages and {microbatches} microbatches",
            numbers=" ".join(str(error).split())[:200],
            way_out="take a number of microbatches that is a multiple of the number of stages, or another schedule",
        ) from error
    schedule = Schedule(name, stages, microbatches, tuple(tuple(map(str, lowered[r])) for r in range(ranks)))
    problems = list(schedule_problems(schedule))
    if problems:
        raise FxparError(
            f"torch's order for {name} of {ranks} ranks, {stages} stages and {microbatches} microbatches does not hold",
            numbers="; ".join(problems[:3]), way_out="another number of microbatches, or another schedule",
        )
    return schedule
