"""Issue gatherings before they are needed: they travel while earlier ops compute.

    y1 = f(w1); w2 = all_gather(s2); y2 = g(y1, w2)   ->   w2 = all_gather(s2); y1 = f(w1); y2 = g(y1, w2)

A gathering moves up to where its operand is there and what is gathered ahead of its first reader stays within a limit.
Their order among those that are ready is kept, and only sizes of the largest rank decide: every rank moves the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from fxpar.runtime.local import AnyStep, CollectiveStep, LocalProgram

#: Bytes gathered ahead at most: twice the largest gathering, and no more than this.
PREFETCH_BYTES = 256 * 2**20


def prefetch_gathers(local: LocalProgram, limit: int | None = None) -> LocalProgram:
    """``local`` with its gatherings issued early; ``limit``: bytes gathered and not read yet, None: see
    :data:`PREFETCH_BYTES`."""
    sizes = [s.bytes for s in local.steps if _is_gather(s)]  # type: ignore[union-attr]
    if not sizes:
        return local
    if limit is None:
        limit = min(PREFETCH_BYTES, 2 * max(sizes))
    defined = set(local.inputs)
    steps: list[AnyStep] = []
    for phase in ("forward", "backward"):
        steps += _Phase([s for s in local.steps if s.phase == phase], defined, limit).run()
    return replace(local, steps=tuple(steps))


def _is_gather(step: AnyStep) -> bool:
    return isinstance(step, CollectiveStep) and step.kind == "all_gather"


class _Phase:
    """Reorders the steps of one phase; used once. ``defined`` is added to."""

    def __init__(self, steps: Sequence[AnyStep], defined: set[int], limit: int) -> None:
        self.steps, self.defined, self.limit = steps, defined, limit
        self.result: list[AnyStep] = []
        self.issued: set[int] = set()  # positions in steps
        self.ready: list[int] = []  # heap of positions
        self.fresh: list[int] = []  # ready from the next step on: a gathering of a gathering waits for the first
        self.missing: dict[int, int] = {}
        self.wanted_by: dict[int, list[int]] = {}
        self.ahead: dict[int, int] = {}  # value -> position of the gathering that makes it, until somebody reads it
        self.bytes_ahead = 0
        self.read = {v for step in steps for v in step.reads}
        for position, step in enumerate(steps):
            if _is_gather(step):
                missing = [v for v in dict.fromkeys(step.reads) if v not in defined]
                self.missing[position] = len(missing)
                for value in missing:
                    self.wanted_by.setdefault(value, []).append(position)
                if not missing:
                    heapq.heappush(self.ready, position)

    def run(self) -> list[AnyStep]:
        for position in range(len(self.steps)):
            while self.fresh:
                heapq.heappush(self.ready, self.fresh.pop())
            while self.ready and self._fits(self.ready[0]):
                self._emit(heapq.heappop(self.ready))
            if position not in self.issued:
                self._emit(position)
        return self.result

    def _fits(self, position: int) -> bool:
        if position in self.issued:
            return True
        step = self.steps[position]
        assert isinstance(step, CollectiveStep)
        return self.bytes_ahead + step.bytes <= self.limit

    def _emit(self, position: int) -> None:
        if position in self.issued:
            return
        step = self.steps[position]
        self.issued.add(position)
        self.result.append(step)
        for value in step.reads:
            maker = self.ahead.pop(value, None)
            if maker is not None:
                gathering = self.steps[maker]
                assert isinstance(gathering, CollectiveStep)
                self.bytes_ahead -= gathering.bytes
                for other in gathering.outputs:
                    self.ahead.pop(other, None)
        if isinstance(step, CollectiveStep) and step.kind == "all_gather" and not self.read.isdisjoint(step.outputs):
            self.bytes_ahead += step.bytes
            self.ahead.update(dict.fromkeys(step.outputs, position))
        for value in step.writes:
            self.defined.add(value)
            for waiting in self.wanted_by.pop(value, ()):
                self.missing[waiting] -= 1
                if not self.missing[waiting]:
                    self.fresh.append(waiting)
