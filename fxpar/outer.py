"""Which mesh, how many stages and how many microbatches are worth a closer look.

Every factorisation of a cluster into stages x data parallel x tensor parallel ranks, with every number of microbatches,
is estimated from its cell (see ``fxpar.cells``): time of the slowest stage, the schedule's bubble, what data parallel
ranks exchange, memory of the first and the last stage. The estimate ranks; what is chosen is decided by searching and
simulating the first of them (see ``fxpar.choose``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fxpar.cells import Amounts, Cell
from fxpar.cost.cluster import Cluster
from fxpar.cost.collectives import CollectiveKind, collective_ns

MOST_STAGES = 64
"""Ranks of a pipeline that are considered."""
LEAST_BUBBLE = 0.5
"""Of 1F1B's bubble, how much the schedules with several stages per rank, or with split backward passes, leave; which
schedule it will be is found out by walking through them."""


@dataclass(frozen=True, order=True)
class Shape:
    """``pp`` x ``dp`` x ``tp`` ranks and ``microbatches`` of one step."""

    pp: int
    dp: int
    tp: int
    microbatches: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the mesh inside a stage, axes of one rank left out."""
        return tuple(n for n in (self.dp, self.tp) if n > 1) or (1,)

    def __str__(self) -> str:
        parts = [f"{name}={n}" for name, n in (("pp", self.pp), ("dp", self.dp), ("tp", self.tp)) if n > 1]
        return f"{','.join(parts) or 'one rank'}, {self.microbatches} microbatch{'es' * (self.microbatches != 1)}"


@dataclass(frozen=True)
class Estimate:
    """ns of a step and bytes of the fullest rank; ``zero``: how parameters are stored (stage 0 to 3); ``again``: the
    share of layers that run again in backward; ``fits``."""

    shape: Shape
    step_ns: float
    peak_bytes: float
    zero: int
    again: float
    fits: bool


def shapes(cluster: Cluster, batch: int, units: int) -> Iterator[Shape]:
    """All that is considered for a batch of so many samples and a model of ``units`` equal parts."""
    for pp in divisors(cluster.world_size):
        if pp > min(MOST_STAGES, max(units, 1)):
            continue
        for tp in divisors(cluster.devices_per_node):
            if (cluster.world_size // pp) % tp:
                continue
            dp = cluster.world_size // pp // tp
            for microbatches in divisors(batch // dp) if batch % dp == 0 else ():
                # a pipeline of fewer microbatches than ranks is idle most of the time
                if microbatches >= pp and (pp == 1 or microbatches > 1):
                    yield Shape(pp, dp, tp, microbatches)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def estimate(
    shape: Shape, kept: Cell, again: Callable[[], Cell], cluster: Cluster, budget: int, computed: float
) -> Estimate:
    """The fastest way of storing parameters and of running layers again that fits, or the smallest.

    Args:
        kept: the shape's cell when forward values are kept; ``again`` gives it when layers run again.
        computed: bytes of the copies of parameters that are computed with, per byte of those that are stored.
    """
    best: Estimate | None = None
    for zero in (0, 1, 2, 3) if shape.dp > 1 else (0,):
        for made in _ways(shape, kept, again, cluster, budget, computed, zero):
            if best is None or (not made.fits, made.step_ns if made.fits else made.peak_bytes) < (
                    not best.fits, best.step_ns if best.fits else best.peak_bytes):
                best = made
    assert best is not None
    return best


def _ways(
    shape: Shape, kept: Cell, again: Callable[[], Cell], cluster: Cluster, budget: int, computed: float, zero: int
) -> Iterator[Estimate]:
    first = _estimate(shape, kept, cluster, computed, zero)
    if first.peak_bytes <= budget:
        yield _judged(first, budget)
        return
    whole = _estimate(shape, again(), cluster, computed, zero)
    if whole.peak_bytes > budget:
        yield _judged(whole, budget, 1.0)
        return
    # layers alike: time and memory are affine in how many run again
    share = (first.peak_bytes - budget) / max(first.peak_bytes - whole.peak_bytes, 1.0)
    step = first.step_ns + share * (whole.step_ns - first.step_ns)
    yield Estimate(shape, step, budget, zero, share, True)


def _judged(found: Estimate, budget: int, share: float = 0.0) -> Estimate:
    return Estimate(found.shape, found.step_ns, found.peak_bytes, found.zero, share, found.peak_bytes <= budget)


def _estimate(shape: Shape, cell: Cell, cluster: Cluster, computed: float, zero: int) -> Estimate:
    pp, count = shape.pp, shape.microbatches
    if pp == 1:
        stages = [_stage(cell, cell.units, 1.0)]
    else:
        inner, last = _units_of_stages(cell, pp)
        # tables at the ends: the first stage has what embeds, the last what predicts and most of the work of both
        stages = [_stage(cell, inner, 0.5, time=0.0), _stage(cell, last, 0.5)]
    slowest, fullest, once = 0.0, 0.0, 0.0
    for number, s in enumerate(stages):
        exchange = _Exchange(s, shape, cluster, computed)
        forward, backward, after = exchange.times(zero)
        slowest, once = max(slowest, forward + backward), max(once, after)
        flight = min(pp, count) if number == 0 else 1.0
        fullest = max(fullest, exchange.stored(zero) + flight * s.kept + s.passing)
    total = cell.rest.plus(cell.unit, cell.units)
    whole = total.forward + total.backward
    bubble = (pp - 1) * whole / pp * LEAST_BUBBLE if pp > 1 else 0.0
    return Estimate(shape, count * slowest + bubble + once, fullest, zero, 0.0, True)


def _units_of_stages(cell: Cell, pp: int) -> tuple[int, int]:
    """Units of all stages but the last, and of the last, which has what is outside of the stacks, so that the slowest
    is as fast as can be."""
    unit, rest = cell.unit.forward + cell.unit.backward, cell.rest.forward + cell.rest.backward
    best = (math.inf, cell.units, 0)
    for last in range(cell.units + 1):
        inner = -(-(cell.units - last) // (pp - 1))
        best = min(best, (max(inner * unit, last * unit + rest), inner, last))
    return best[1], best[2]


def _stage(cell: Cell, units: int, stored: float, *, time: float = 1.0) -> Amounts:
    """What a stage of ``units`` has; of the rest the share ``stored`` of what is stored, ``time`` of all else."""
    rest = cell.rest
    part = replace(
        rest, forward=rest.forward * time, backward=rest.backward * time, forward_link=rest.forward_link * time,
        backward_link=rest.backward_link * time, kept=rest.kept * time, passing=rest.passing * time,
        parameters=rest.parameters * stored, gradients=rest.gradients * stored, optimizer=rest.optimizer * stored,
    )
    # what passes is there once, not per unit
    return replace(part.plus(cell.unit, units), passing=max(part.passing, cell.unit.passing))


@dataclass(frozen=True)
class _Exchange:
    """What the data parallel ranks of a stage exchange."""

    stage: Amounts
    shape: Shape
    cluster: Cluster
    computed: float

    def ns(self, kind: CollectiveKind, size: float) -> float:
        shape = self.shape
        if shape.dp == 1 or size < 1:
            return 0.0
        sizes = tuple(n for n in (shape.pp, shape.dp, shape.tp) if n > 1)
        return float(collective_ns(self.cluster, sizes, sizes.index(shape.dp, int(shape.pp > 1)), kind, int(size)))

    def times(self, zero: int) -> tuple[float, float, float]:
        """ns of forward and backward of a microbatch, and of what comes once a step and is not hidden."""
        s, alone = self.stage, self.shape.microbatches == 1
        gather = self.ns("all_gather", s.parameters * self.computed)
        scatter = self.ns("reduce_scatter", s.gradients)
        forward, backward, after = s.forward, s.backward, 0.0
        # one link for all: what data parallel ranks exchange waits for what tensor parallel ranks do
        before, late = s.forward_link, s.backward_link
        if zero == 0:
            reduce = self.ns("all_reduce", s.gradients)
            if alone:
                backward = max(backward, late + reduce)
            else:
                after = reduce
        elif zero < 3 and alone:
            forward, backward = max(forward, before + gather), max(backward, late + scatter)
        elif zero == 1:
            after = gather + scatter
        elif zero == 2:
            after, backward = gather, max(backward, late + scatter)
        else:
            forward, backward = max(forward, before + gather), max(backward, late + gather + scatter)
        return forward, backward, after

    def stored(self, zero: int) -> float:
        """Bytes of parameters, of the copies that stay, of gradients and optimizer state."""
        s, dp = self.stage, self.shape.dp
        cut = dp if zero else 1
        copies = s.parameters * self.computed if zero < 3 and (zero or self.computed < 1) else 0.0
        gradients = s.gradients / (dp if zero >= 2 else 1)
        return s.parameters / cut + copies + gradients + s.optimizer / cut
