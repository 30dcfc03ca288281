"""What a step waits for: the stalls of compute in a replay, shared out to the collectives that were on the link."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fxpar.replay_memory import bytes_of
from fxpar.runtime.local import AnyStep, CollectiveStep, LocalProgram


@dataclass(frozen=True)
class Watched:
    """What a replay writes down, in order of time: (begin, end, step) of every collective and of every other step, and
    (begin, end) wherever compute waited; ns."""

    sent: list[tuple[int, int, CollectiveStep]] = field(default_factory=list)
    stalls: list[tuple[int, int]] = field(default_factory=list)
    ran: list[tuple[int, int, AnyStep]] = field(default_factory=list)


def waited_for(local: LocalProgram, watched: Watched) -> dict[int, tuple[int, int]]:
    """Per program value (ns that a step waits for its collectives, ns that they take), of a replay of ``local``.

    Where compute stands still it waits for whatever is on the link meanwhile, also for what only delays the collective
    it needs. A bucket's time is shared out by bytes.
    """
    waited: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    for (begin, done, step), wait in zip(watched.sent, _waits(watched), strict=True):
        sizes = [bytes_of(local.types[v]) for v in step.outputs]
        whole = max(sum(sizes), 1)
        for value, size in zip(step.outputs, sizes, strict=True):
            origin = local.origins[value][0]
            waited[origin] += wait * size // whole
            taken[origin] += (done - begin) * size // whole
    return {value: (waited[value], time) for value, time in taken.items() if value >= 0 and time}


def _waits(watched: Watched) -> list[int]:
    """Of every collective sent: ns for which compute stood still while it was on the link."""
    waits = [0] * len(watched.sent)
    first = 0
    for start, end in watched.stalls:
        while first < len(watched.sent) and watched.sent[first][1] <= start:
            first += 1
        for index in range(first, len(watched.sent)):
            begin, done, _ = watched.sent[index]
            if begin >= end:
                break
            waits[index] += min(done, end) - max(begin, start)
    return waits
