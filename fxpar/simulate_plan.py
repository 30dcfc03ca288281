"""A plan simulated again, on its own cluster or on another one, without the model and without a search.

What is replayed is what was replayed when the plan was chosen: the programs of the rank at the corner of the mesh. What
a rank holds does not depend on the cluster and is taken from the plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fxpar.cost.cluster import Cluster
from fxpar.plans.errors import FxparError
from fxpar.plans.plan import Plan
from fxpar.prices import Prices
from fxpar.replay_microbatches import sum_timelines
from fxpar.runtime.local import AddStep, LocalProgram, OpStep
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.microbatches import split_pieces
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.show import gib, ms, table
from fxpar.simulate import replay_time
from fxpar.simulate_stages import Ran, simulate_stages
from fxpar.timeline import Timeline
from fxpar.waits import Watched, waited_for

SHOWN = 12
"""Regions that the text lists."""


@dataclass(frozen=True)
class Event:
    """Something that takes time on a rank: on stream "compute" or "link", or an action of a pipeline's rank; ns."""

    rank: int
    stream: str
    name: str
    module: str
    begin_ns: int
    ns: int
    bytes: int = 0


@dataclass(frozen=True)
class Region:
    """Modules of one name in all layers: ns that a step waits for their collectives, and that these take."""

    name: str
    waited_ns: int
    communication_ns: int


@dataclass(frozen=True)
class Simulated:
    """One training step on a cluster: ns; bytes on the fullest device and how many a plan may fill there. ``bubble``:
    share of the step that the busiest rank waits, of plans with stages. ``regions``: of plans without microbatches and
    stages, the longest wait first."""

    cluster: str
    origin: str
    step_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    peak_bytes: int
    usable_bytes: int
    bubble: float | None
    regions: tuple[Region, ...]
    events: tuple[Event, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without the events."""
        return {key: value for key, value in asdict(self).items() if key != "events"}

    def text(self, planned_ns: int) -> str:
        """For people; ``planned_ns``: the step that the plan file predicts."""
        waits = f"; ranks wait {self.bubble:.1%} of the step" if self.bubble is not None else ""
        lines = [
            f"on {self.cluster} ({self.origin} rates): step {ms(self.step_ns)}, {self.step_ns / planned_ns - 1:+.1%} "
            f"of the {ms(planned_ns)} in the plan (simulated)",
            f"  compute {ms(self.compute_ns)}, communication {ms(self.communication_ns)}, of it exposed "
            f"{ms(self.exposed_ns)}{waits}",
            f"  memory {gib(self.peak_bytes)} of {gib(self.usable_bytes)} per device"
            + ("" if self.peak_bytes <= self.usable_bytes else ": it does not fit"),
        ]
        if self.regions:
            rows: list[tuple[str, ...]] = [("what a step waits for", "", "")]
            for r in self.regions[:SHOWN]:
                rows.append((r.name or "the model itself", f"waits {ms(r.waited_ns)}", f"of {ms(r.communication_ns)}"))
            lines += ["", *table(rows)]
        return "\n".join(lines)


def simulate_plan(plan: Plan, cluster: Cluster) -> Simulated:
    """Simulate one step of a plan.

    Raises:
        FxparError: the cluster has another number of devices than the plan's mesh.
    """
    mesh = plan.decisions.mesh
    if cluster.world_size != mesh.world_size:
        raise FxparError(
            f"the plan is for {mesh.world_size} devices, {cluster.name} has {cluster.world_size}",
            where=f"--cluster; the plan's mesh is {mesh}",
            numbers=f"{cluster.nodes} x {cluster.devices_per_node} = {cluster.world_size}",
            way_out=f"a cluster of {mesh.world_size} devices, or compile the model for this one",
        )
    bubble: float | None = None
    events: list[Event] = []
    if plan.decisions.pipeline is not None:
        ran: list[Ran] = []
        prediction, walk = simulate_stages(plan.program, plan.decisions, cluster, lambda dtype, name: 0, ran=ran)
        step, compute, communication = prediction.step_ns, prediction.compute_ns, prediction.communication_ns
        exposed, bubble = prediction.exposed_ns, walk.bubble
        events = [Event(r.rank, "actions", str(r.action), "", r.begin, r.end - r.begin) for r in ran]
        rows: tuple[Region, ...] = ()
    else:
        timeline, events, rows = _one_program(plan, Prices(cluster, mesh))
        step, compute, communication = timeline.step_ns, timeline.compute_ns, timeline.communication_ns
        exposed = timeline.exposed_ns
    return Simulated(
        f"{cluster.nodes}x{cluster.devices_per_node}:{cluster.name}", cluster.origin, step, compute, communication,
        exposed, plan.prediction.peak_bytes, cluster.usable_bytes, bubble, rows, tuple(events),
    )


def _one_program(plan: Plan, prices: Prices) -> tuple[Timeline, list[Event], tuple[Region, ...]]:
    """Of a plan without stages."""
    corner, program = (0,) * len(plan.decisions.mesh.axes), plan.program
    if program.time is None:
        local = rewrite(program, plan.decisions, corner, every_pass=False)
        watched = Watched()
        timeline = replay_time(local, prices, watched)
        modules = _module_of_value(plan)
        return timeline, list(_events(plan, local, watched, modules)), _regions(local, watched, modules)
    parts = split_pieces(program, plan.decisions, localise(program, plan.decisions, corner))
    modules = _module_of_value(plan)
    replayed: list[tuple[Timeline, list[Event]]] = []
    for piece in parts.programs:
        watched = Watched()
        timeline = replay_time(piece, prices, watched)
        replayed.append((timeline, list(_events(plan, piece, watched, modules))))
    prologue, forward, backward, epilogue = replayed
    events: list[Event] = []
    begin = 0
    for timeline, some in (prologue, *(forward, backward) * program.microbatches, epilogue):
        events += [replace(e, begin_ns=begin + e.begin_ns) for e in some]
        begin += timeline.step_ns
    often = (1, program.microbatches, program.microbatches, 1)
    return sum_timelines((timeline, n) for (timeline, _), n in zip(replayed, often, strict=True)), events, ()


def _events(plan: Plan, local: LocalProgram, watched: Watched, modules: Mapping[int, str]) -> Iterable[Event]:
    for start, end, step in watched.ran:
        if end == start:  # views
            continue
        if isinstance(step, OpStep):
            module = plan.program.nodes[step.node].module if step.node >= 0 else ""
            yield Event(0, "compute", step.op, module, start, end - start)
        else:
            yield Event(0, "compute", "add" if isinstance(step, AddStep) else "copy", "", start, end - start)
    for start, end, step in watched.sent:
        origin = local.origins[step.outputs[0]][0]
        name = f"{step.kind} on {local.mesh.axes[step.axis].name}"
        yield Event(0, "link", name, modules.get(origin, ""), start, end - start, step.bytes)


def _regions(local: LocalProgram, watched: Watched, modules: Mapping[int, str]) -> tuple[Region, ...]:
    waited: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for value, (wait, time) in waited_for(local, watched).items():
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", modules.get(value, ""))
        waited[name] += wait
        taken[name] += time
    found = (Region(name, wait, taken[name]) for name, wait in waited.items() if wait)
    return tuple(sorted(found, key=lambda r: (-r.waited_ns, r.name)))


def _module_of_value(plan: Plan) -> dict[int, str]:
    """Of values that ops make their module, of parameters their name."""
    found = {v: node.module for node in plan.program.nodes for v in node.outputs if v >= 0}
    return {**found, **{i.value: i.name for i in plan.program.inputs}}


def chrome_trace(plan: Plan, simulated: Simulated) -> dict[str, Any]:
    """The events in the format that Perfetto (ui.perfetto.dev) and chrome://tracing open: times in microseconds, a
    process per rank, a thread per stream."""
    streams = sorted({(e.rank, e.stream) for e in simulated.events})
    named = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} of {plan.decisions.mesh}"}}
        for rank in sorted({rank for rank, _ in streams})
    ] + [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": stream}}
        for number, (rank, stream) in enumerate(streams)
    ]
    lanes = {lane: number for number, lane in enumerate(streams)}
    ran = [
        {"ph": "X", "name": e.name, "cat": e.stream, "pid": e.rank, "tid": lanes[e.rank, e.stream],
         "ts": e.begin_ns / 1e3, "dur": e.ns / 1e3, "args": {"module": e.module, "bytes": e.bytes}}
        for e in simulated.events
    ]  # fmt: skip
    return {"displayTimeUnit": "ms", "otherData": {"cluster": simulated.cluster, "figures": "simulated"},
            "traceEvents": [*named, *ran]}
