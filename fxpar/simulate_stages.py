"""What a plan with stages will cost: every stage's pieces replayed, then the schedule's actions walked through.

Time: a rank runs its actions in order; what another rank sends has to have come. A message leaves when both ranks have
got to it, takes its link's time and nothing of the ranks'. Memory: see :mod:`fxpar.stage_memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxpar.cost.cluster import Cluster
from fxpar.plans.plan import CollectiveTotal, Decisions, Prediction
from fxpar.plans.program import Program
from fxpar.plans.schedule import COMPUTE, SENDS, Action, Schedule, leaves_of, rank_of_stage
from fxpar.prices import MovingKind, Prices
from fxpar.runtime.local import LocalProgram
from fxpar.runtime.rewrite.stage_pieces import StagePieces, stage_decisions, stage_mesh, stage_pieces, stages_of
from fxpar.simulate import OptimizerBytes, replay_time
from fxpar.stage_memory import StageMemory, rank_peaks, rank_static, stage_memory
from fxpar.timeline import Timeline


@dataclass(frozen=True, eq=False)
class StagePrices(Prices):
    """Prices on the mesh inside a stage, whose links are those of the whole mesh. ``axes[i]``: which axis of
    ``whole`` (sizes) axis ``i`` is."""

    whole: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()

    def collective_ns(self, kind: MovingKind, axis: int | tuple[int, ...], size: int) -> int:
        """As :meth:`Prices.collective_ns`."""
        from fxpar.cost.collectives import collective_ns

        moving = "send" if kind in ("halo", "halo_sum") else kind
        where = self.axes[axis] if isinstance(axis, int) else tuple(self.axes[a] for a in axis)
        return collective_ns(self.cluster, self.whole, where, moving, size)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StageCost:
    """One stage on one rank: times of its pieces, and its memory."""

    prologue: Timeline
    forward: Timeline
    backward: Timeline
    inputs: Timeline
    weights: Timeline
    epilogue: Timeline
    memory: StageMemory

    def timeline(self, kind: str) -> Timeline | None:
        """What an action runs."""
        return {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights, "UNSHARD": self.prologue,
                "REDUCE_GRAD": self.epilogue}.get(kind)


@dataclass(frozen=True)
class Walk:
    """A schedule walked through: when each rank ends, and per rank what it computes and communicates inside stages, and
    how long its actions take (what is hidden behind computation counts once)."""

    ends: tuple[int, ...]
    compute: tuple[int, ...]
    communication: tuple[int, ...]
    busy: tuple[int, ...]

    @property
    def step_ns(self) -> int:
        return max(self.ends)

    @property
    def bubble(self) -> float:
        """Share of the step in which the busiest rank waits."""
        return 1.0 - max(self.busy) / max(self.step_ns, 1)


class Ran(NamedTuple):
    """An action of a pipeline's rank: when it began and ended, in ns."""

    rank: int
    begin: int
    end: int
    action: Action


def simulate_stages(
    program: Program, decisions: Decisions, cluster: Cluster, optimizer_bytes: OptimizerBytes,
    costs: tuple[StageCost, ...] | None = None, ran: list[Ran] | None = None,
) -> tuple[Prediction, Walk]:
    """Time and memory of one training step of a plan with stages, and the walk through its schedule. ``costs``: those
    of its stages, when they are known; ``ran``: where to write down what actions take."""
    pipeline = decisions.pipeline
    assert pipeline is not None
    costs = costs or stage_costs(program, decisions, cluster, optimizer_bytes)
    whole = Prices(cluster, decisions.mesh)
    walk = walk_schedule(
        pipeline.schedule, costs, lambda size: whole.collective_ns("send", pipeline.axis, size), ran
    )
    totals = _totals(decisions, costs, whole)
    memory = [cost.memory for cost in costs]
    peaks = rank_peaks(pipeline.schedule, memory)
    fullest = max(range(len(peaks)), key=peaks.__getitem__)
    static = rank_static(pipeline.schedule, memory, fullest)
    busiest = max(range(len(peaks)), key=walk.compute.__getitem__)
    return Prediction(
        step_ns=walk.step_ns, compute_ns=walk.compute[busiest], communication_ns=walk.communication[busiest],
        exposed_ns=walk.step_ns - walk.compute[busiest], peak_bytes=peaks[fullest],
        parameter_bytes=static.parameters, gradient_bytes=static.gradients, optimizer_bytes=static.optimizer,
        activation_bytes=peaks[fullest] - static.parameters - static.gradients - static.optimizer, collectives=totals,
    ), walk


def stage_costs(
    program: Program, decisions: Decisions, cluster: Cluster, optimizer_bytes: OptimizerBytes
) -> tuple[StageCost, ...]:
    """Every stage replayed on the rank at the corner of its mesh."""
    mesh = stage_mesh(decisions)
    prices = StagePrices(cluster, mesh, decisions.mesh.sizes, tuple(range(len(mesh.axes))))
    stages = stages_of(program, decisions)
    found = []
    for number, (stage, decided) in enumerate(
        zip(stages.stages, stage_decisions(program, decisions, stages), strict=True)
    ):
        parts = stage_pieces(stage, decided, (0,) * len(mesh.axes))
        owned = {program.inputs[i].name for i, owner in enumerate(stages.owners) if owner == number}

        def owners_bytes(dtype: str, name: str, owned: set[str] = owned) -> int:
            return optimizer_bytes(dtype, name) if name in owned else 0

        found.append(_stage_cost(parts, prices, owners_bytes))
    return tuple(found)


def _stage_cost(parts: StagePieces, prices: Prices, optimizer_bytes: OptimizerBytes) -> StageCost:
    pieces = parts.pieces

    def time(local: LocalProgram) -> Timeline:
        return replay_time(local, prices)

    return StageCost(
        time(pieces.prologue), time(pieces.forward), time(parts.backward), time(parts.backward_inputs),
        time(parts.backward_weights), time(parts.epilogue), stage_memory(parts, optimizer_bytes),
    )


def walk_schedule(
    schedule: Schedule, costs: Sequence[StageCost], send_ns: Callable[[int], int], ran: list[Ran] | None = None
) -> Walk:
    """Run through the actions of every rank; ``send_ns``: time of so many bytes to another rank of the pipeline;
    ``ran``: where to write down what actions take."""

    def sent(action: Action) -> int:
        memory = costs[action.stage].memory
        return send_ns(memory.sent if action.kind == "SEND_F" else memory.returned)

    return walk_actions(schedule, lambda action: costs[action.stage].timeline(action.kind), sent, ran)


def walk_actions(
    schedule: Schedule, timeline_of: Callable[[Action], Timeline | None], sent_ns: Callable[[Action], int],
    ran: list[Ran] | None = None,
) -> Walk:
    """Run through the actions of every rank.

    Args:
        timeline_of: what an action runs; None of actions that take no time of the rank's.
        sent_ns: time that what a SEND_F or SEND_B sends takes.
        ran: where to write down what takes time.
    """
    rows, places = leaves_of(schedule), rank_of_stage(schedule)
    position, clock = [0] * len(rows), [0] * len(rows)
    compute, communication, busy = [0] * len(rows), [0] * len(rows), [0] * len(rows)
    # by (stage that reads it, "F" or "B", microbatch): when a value made on this rank is there; when what comes from
    # another rank was sent and what it takes; when the receiver got to it
    made: dict[tuple[int, str, int], int] = {}
    sent: dict[tuple[int, str, int], tuple[int, int]] = {}
    asked: dict[tuple[int, str, int], int] = {}

    def come(a: Action) -> int | None:
        """When what a computation reads is there; None while that is not known."""
        forward = a.kind == "F"
        before = a.stage - 1 if forward else a.stage + 1
        if a.kind == "W" or not 0 <= before < len(places):
            return 0
        key = (a.stage, "F" if forward else "B", a.microbatch)
        if places[before] == places[a.stage]:
            return made.get(key)
        return max(sent[key][0], asked[key]) + sent[key][1] if key in sent else None

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                a = row[position[rank]]
                ready = come(a) if a.kind in COMPUTE else 0
                if ready is None:
                    break
                timeline = timeline_of(a)
                if timeline is not None:
                    clock[rank] = max(clock[rank], ready) + timeline.step_ns
                    if ran is not None:
                        ran.append(Ran(rank, clock[rank] - timeline.step_ns, clock[rank], a))
                    busy[rank] += timeline.step_ns
                    compute[rank] += timeline.compute_ns
                    communication[rank] += timeline.communication_ns
                after = (a.stage + 1, "F", a.microbatch) if a.kind in ("F", "SEND_F") else (
                    a.stage - 1, "B", a.microbatch)
                if a.kind in SENDS:
                    sent[after] = (clock[rank], sent_ns(a))
                elif a.kind in SENDS.values():
                    asked[a.stage, a.kind[-1], a.microbatch] = clock[rank]
                elif a.kind in ("F", "B", "I"):
                    made[after] = clock[rank]
                position[rank] += 1
                moved = True
    return Walk(tuple(clock), tuple(compute), tuple(communication), tuple(busy))


def _totals(decisions: Decisions, costs: tuple[StageCost, ...], whole: Prices) -> tuple[CollectiveTotal, ...]:
    """Collectives and sends of all stages together, of the ranks at the corner of their meshes."""
    pipeline = decisions.pipeline
    assert pipeline is not None
    counts: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    spent: Counter[tuple[str, str]] = Counter()
    places = rank_of_stage(pipeline.schedule)
    name = decisions.mesh.axes[pipeline.axis].name
    for row in leaves_of(pipeline.schedule):
        for a in row:
            cost = costs[a.stage]
            timeline = cost.timeline(a.kind)
            for total in timeline.totals if timeline is not None else ():
                key = (total.kind, total.axis)
                counts[key] += total.count
                moved[key] += total.bytes
                spent[key] += total.ns
            if a.kind in ("SEND_F", "SEND_B") and places:
                size = cost.memory.sent if a.kind == "SEND_F" else cost.memory.returned
                counts["send", name] += 1
                moved["send", name] += size
                spent["send", name] += whole.collective_ns("send", pipeline.axis, size)
    return tuple(CollectiveTotal(*key, counts[key], moved[key], spent[key]) for key in sorted(counts))
