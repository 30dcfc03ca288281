"""A pipeline schedule as text: what each rank of the pipeline does, in order. Plain data, no torch.

An action is ``[stage][kind][microbatch]``, the words of ``torch.distributed.pipelining``:

    0F1         forward of microbatch 1 in stage 0
    0B1         its whole backward, or in two parts: 0I1 gradients of its inputs, 0W1 gradients of weights
    0SEND_F1    what the next stage needs goes out;   1RECV_F1  and arrives (SEND_B, RECV_B: gradients, downwards)
    0UNSHARD    parameters of the stage are gathered; 0RESHARD  the gathered copies are let go
    0REDUCE_GRAD  gradients of all microbatches are reduced over the stage's ranks and to the owners of tied parameters
    (0F4;3B1)OVERLAP_F_B  two actions that may overlap

Stages that follow each other on one rank hand values over without sends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

MAX_STAGES = 4096
MAX_MICROBATCHES = 65536
COMPUTE = ("F", "B", "I", "W")
SENDS = {"SEND_F": "RECV_F", "SEND_B": "RECV_B"}
"""Kind of a send -> kind of the receive that it meets."""
ONCE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
OVERLAP = "OVERLAP_F_B"
_ACTION = re.compile(r"(\d{1,4})(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{0,5})")


class Action(NamedTuple):
    """One action; ``microbatch`` is -1 where it stands for all of them, ``parts`` are those of an overlap."""

    stage: int
    kind: str
    microbatch: int = -1
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The action itself, or the parts of an overlap in order."""
        return self.parts or (self,)


@lru_cache(maxsize=200_000)
def parse_action(text: str) -> Action:
    """Inverse of ``str(action)``.

    Raises:
        ValueError: the text is no action.
    """
    if text.startswith("(") and text.endswith(")" + OVERLAP):
        parts = tuple(parse_action(part) for part in text[1 : -len(OVERLAP) - 1].split(";"))
        if len(parts) < 2 or any(p.kind not in COMPUTE for p in parts):
            raise ValueError(f"'{text[:60]}' does not overlap two computations")
        return Action(-1, OVERLAP, -1, parts)
    found = _ACTION.fullmatch(text)
    if found is None or (found[3] == "") != (found[2] in ONCE):
        raise ValueError(f"'{text[:60]}' is not an action of a schedule")
    return Action(int(found[1]), found[2], int(found[3]) if found[3] else -1)


class Schedule(msgspec.Struct, frozen=True):
    """What every rank of the pipeline does in a step.

    ``name``: what it was asked for by (``"1f1b"``); ``ranks[r]`` the actions of the rank at coordinate ``r`` of the
    pipeline's mesh axis, in order.
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[str, ...], ...]


def actions_of(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Every rank's actions.

    Raises:
        ValueError: a text is no action.
    """
    return tuple(tuple(map(parse_action, row)) for row in schedule.ranks)


def leaves_of(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Every rank's actions with overlaps as their parts in order."""
    return tuple(tuple(leaf for action in row for leaf in action.leaves) for row in actions_of(schedule))


def rank_of_stage(schedule: Schedule) -> tuple[int, ...]:
    """Per stage the rank that computes it, -1 where none does."""
    ranks = [-1] * schedule.stages
    for rank, row in enumerate(leaves_of(schedule)):
        for action in row:
            if action.kind in COMPUTE and action.stage < schedule.stages:
                ranks[action.stage] = rank
    return tuple(ranks)


def schedule_problems(schedule: Schedule) -> Iterator[str]:
    """Every way in which the schedule is not one that runs every microbatch through every stage, once, to its end."""
    if not 1 <= schedule.stages <= MAX_STAGES or not 1 <= schedule.microbatches <= MAX_MICROBATCHES:
        yield f"the schedule has {schedule.stages} stages and {schedule.microbatches} microbatches"
        return
    try:
        rows = leaves_of(schedule)
    except ValueError as error:
        yield str(error)
        return
    counts = [Counter(row) for row in rows]
    outside = [a for row in rows for a in row
               if a.stage >= schedule.stages or a.microbatch >= schedule.microbatches]
    twice = [a for count in counts for a, n in count.items() if n > 1 and a.kind not in ("UNSHARD", "RESHARD")]
    places: dict[int, set[int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            places.setdefault(action.stage, set()).add(rank)
    shared = [stage for stage, ranks in places.items() if len(ranks) > 1]
    if outside or twice or shared:
        yield from (f"{a} is of a stage or microbatch that the schedule does not have" for a in outside[:3])
        yield from (f"{a} is there twice" for a in twice[:3])
        yield from (f"stage {stage} is on ranks {sorted(places[stage])}" for stage in shared[:3])
        return
    yield from _missing(schedule, set().union(*counts))
    yield from _out_of_place(schedule, rows)
    yield from _stuck(schedule, rows)


def _missing(schedule: Schedule, have: set[Action]) -> Iterator[str]:
    """Computations that are not there, or are there both whole and in parts."""
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            done = "".join(k for k in COMPUTE if Action(stage, k, microbatch) in have)
            if done not in ("FB", "FIW"):
                yield f"stage {stage} runs {done or 'nothing'} of microbatch {microbatch}, not F and B, or F, I and W"
                return
        if Action(stage, "REDUCE_GRAD") not in have:
            yield f"stage {stage} never reduces its gradients"


def _out_of_place(schedule: Schedule, rows: tuple[tuple[Action, ...], ...]) -> Iterator[str]:
    """Actions before what they need on their own rank."""
    for row in rows:
        done: set[tuple[int, str, int]] = set()
        ends: Counter[int] = Counter()
        held: set[int] = set()
        for a in row:
            key = (a.stage, a.kind, a.microbatch)
            needs = {"B": "F", "I": "F", "W": "I", "SEND_F": "F"}.get(a.kind)
            if a.kind == "SEND_B":
                fine = any((a.stage, k, a.microbatch) in done for k in "BI")
            elif a.kind in ("UNSHARD", "RESHARD"):
                fine = (a.stage in held) == (a.kind == "RESHARD")
                held ^= {a.stage}
            elif a.kind == "REDUCE_GRAD":
                fine = ends[a.stage] == schedule.microbatches
            else:
                fine = needs is None or (a.stage, needs, a.microbatch) in done
                fine &= a.kind not in COMPUTE or a.stage in held
            if not fine:
                yield f"{a} comes before what it needs"
                return
            ends[a.stage] += a.kind in "BW"
            done.add(key)


def _stuck(schedule: Schedule, rows: tuple[tuple[Action, ...], ...]) -> Iterator[str]:
    """What a run meets in which a send waits for its receive and a receive for its send: the strictest there is."""
    where = {a.stage: rank for rank, row in enumerate(rows) for a in row if a.kind in COMPUTE}
    position = [0] * len(rows)
    arrived: set[Action] = set()  # computations done, and receives

    def head(rank: int) -> Action | None:
        return rows[rank][position[rank]] if position[rank] < len(rows[rank]) else None

    def ready(a: Action) -> bool:
        if a.kind == "F" and a.stage > 0:
            local = where[a.stage - 1] == where[a.stage]
            return Action(a.stage - 1, "F", a.microbatch) in arrived if local else (
                Action(a.stage, "RECV_F", a.microbatch) in arrived)
        if a.kind in ("B", "I") and a.stage < schedule.stages - 1:
            if where[a.stage + 1] == where[a.stage]:
                return any(Action(a.stage + 1, k, a.microbatch) in arrived for k in "BI")
            return Action(a.stage, "RECV_B", a.microbatch) in arrived
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(len(rows)):
            while (a := head(rank)) is not None:
                if a.kind in SENDS:
                    peer = a.stage + (1 if a.kind == "SEND_F" else -1)
                    other = where.get(peer, rank)
                    meets = Action(peer, SENDS[a.kind], a.microbatch)
                    if other == rank or head(other) != meets:
                        break
                    arrived.add(meets)
                    position[other] += 1
                elif a.kind in SENDS.values() or not ready(a):
                    break
                arrived.add(a)
                position[rank] += 1
                moved = True
    for rank in range(len(rows)):
        if (a := head(rank)) is not None:
            yield f"rank {rank} waits at {a} for ever"


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage the most microbatches that are there at once: forward has run, the last of backward has not."""
    peaks = [0] * schedule.stages
    for row in leaves_of(schedule):
        now: Counter[int] = Counter()
        for a in row:
            if a.kind == "F":
                now[a.stage] += 1
                peaks[a.stage] = max(peaks[a.stage], now[a.stage])
            elif a.kind in ("B", "W"):
                now[a.stage] -= 1
    return tuple(peaks)


def in_flight_on_rank(schedule: Schedule) -> tuple[int, ...]:
    """Per rank the most (stage, microbatch) pairs that are there at once."""
    peaks = []
    for row in leaves_of(schedule):
        now = peak = 0
        for a in row:
            now += (a.kind == "F") - (a.kind in ("B", "W"))
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
