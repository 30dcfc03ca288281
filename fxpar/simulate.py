"""What a plan will cost: the rewritten program of one rank, replayed without tensors.

The program replayed IS the one that runs (``fxpar.runtime.rewrite``), on the rank at coordinate 0 of every axis, which
holds the largest shards. Time: one compute stream in program order and one communication stream; a collective starts
when its operand is ready and the stream is free, and a step waits for the collectives it reads (some steps do nothing
else: they bound what gradient reductions hold, see ``fxpar.runtime.rewrite.in_flight``). Memory: see
``replay_memory``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from fxpar.cost.compute import Work, compute_ns
from fxpar.cost.op_work import TensorShape, work_of
from fxpar.plans.plan import CollectiveTotal, Decisions, Prediction
from fxpar.plans.program import Arg, Program, Ref
from fxpar.prices import Prices
from fxpar.replay_memory import bytes_of, gradient_positions, replay_memory, shape_of
from fxpar.replay_microbatches import kept_bytes, replay_pieces_memory, sum_timelines
from fxpar.rules.factor_rule import argument_names
from fxpar.runtime.local import AddStep, CollectiveStep, LocalProgram, LocalStep, OpStep, WaitStep
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.microbatches import split_pieces
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.timeline import Timeline
from fxpar.waits import Watched, waited_for

OptimizerBytes = Callable[[str, str], int]


@dataclass(frozen=True)
class Replayed:
    """A prediction, the program values that are live at the peak (see ``Memory.at_peak``), of a program that repeats
    in time the bytes that forward keeps for backward, and of one that does not what the step waits for (see
    :func:`fxpar.waits.waited_for`)."""

    prediction: Prediction
    at_peak: tuple[int, ...]
    kept: int = 0
    waited: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def simulate(program: Program, decisions: Decisions, prices: Prices, optimizer_bytes: OptimizerBytes) -> Prediction:
    """Time and memory of one training step under the decisions."""
    return replay(program, decisions, prices, optimizer_bytes).prediction


def replay(program: Program, decisions: Decisions, prices: Prices, optimizer_bytes: OptimizerBytes) -> Replayed:
    """:func:`simulate`, what is live at the peak, and what the step waits for."""
    waited: dict[int, tuple[int, int]] = {}
    corner, kept = (0,) * len(decisions.mesh.axes), 0
    if program.time is None:
        local = rewrite(program, decisions, corner, every_pass=False)
        watched = Watched()
        timeline = replay_time(local, prices, watched)
        waited = waited_for(local, watched)
        static = replay_static(program, local, optimizer_bytes)
        memory = replay_memory(local, gradient_positions(program))
    else:
        whole = localise(program, decisions, corner)
        parts = split_pieces(program, decisions, whole)
        often = (1, program.microbatches, program.microbatches, 1)
        timeline = sum_timelines((replay_time(p, prices), n) for p, n in zip(parts.programs, often, strict=True))
        static = replay_static(program, whole, optimizer_bytes, parts.epilogue)
        memory = replay_pieces_memory(program, parts)
        kept = kept_bytes(program, whole, parts)
    prediction = Prediction(
        step_ns=timeline.step_ns,
        compute_ns=timeline.compute_ns,
        communication_ns=timeline.communication_ns,
        exposed_ns=timeline.exposed_ns,
        peak_bytes=memory.peak + static.optimizer,
        parameter_bytes=static.parameters,
        gradient_bytes=static.gradients,
        optimizer_bytes=static.optimizer,
        activation_bytes=memory.activations,
        collectives=timeline.totals,
    )
    return Replayed(prediction, memory.at_peak, kept, waited)


def replay_time(local: LocalProgram, prices: Prices, watched: Watched | None = None) -> Timeline:
    """Replay on a compute and a communication stream."""
    ready = [0] * len(local.types)
    compute = link = busy = communication = 0
    counts: Counter[tuple[str, int]] = Counter()
    moved: Counter[tuple[str, int]] = Counter()
    spent: Counter[tuple[str, int]] = Counter()
    for step in local.steps:
        start = max([ready[v] for v in step.reads], default=0)
        if isinstance(step, CollectiveStep):
            time = prices.collective_ns(step.kind, step.axis, step.bytes)
            # issued when compute reaches it: not before its place in the program
            begin = max(link, start, compute)
            link = begin + time
            communication += time
            done = link
            if watched is not None:
                watched.sent.append((begin, done, step))
            key = (step.kind, step.axis)
            counts[key] += 1
            moved[key] += step.bytes
            spent[key] += time
        else:
            time = local_step_ns(step, local, prices)
            if watched is not None and start > compute:
                watched.stalls.append((compute, start))
            compute = max(compute, start) + time
            busy += time
            done = compute
            if watched is not None:
                watched.ran.append((done - time, done, step))
        for value in step.writes:
            ready[value] = done
    totals = tuple(
        CollectiveTotal(kind, local.mesh.axes[axis].name, counts[kind, axis], moved[kind, axis], spent[kind, axis])
        for kind, axis in sorted(counts)
    )
    end = max([compute, *(ready[v] for v in local.outputs)])
    if watched is not None and end > compute:
        watched.stalls.append((compute, end))
    return Timeline(end, busy, communication, totals)


def local_step_ns(step: OpStep | LocalStep | AddStep | WaitStep, local: LocalProgram, prices: Prices) -> int:
    """Time of a step without communication."""
    if isinstance(step, WaitStep):
        return 0
    if isinstance(step, LocalStep):
        kept = local.types[step.output]
        return compute_ns(prices.cluster.device, Work("memory", 0, 2 * bytes_of(kept), kept.dtype))
    if isinstance(step, AddStep):
        added = local.types[step.output]
        return compute_ns(prices.cluster.device, Work("memory", 0, 3 * bytes_of(added), added.dtype))
    operands = tuple(shape_of(local.types[v]) for v in step.operands)
    outputs = tuple(None if v < 0 else shape_of(local.types[v]) for v in step.outputs)
    plain = tuple(None if _refers(arg) else arg for arg in step.args)
    return _op_ns(prices, step.op, operands, outputs, plain)


def _refers(arg: Arg) -> bool:
    return isinstance(arg, Ref) or (isinstance(arg, tuple) and any(map(_refers, arg)))


@lru_cache(maxsize=100_000)
def _op_ns(
    prices: Prices, op: str, operands: tuple[TensorShape, ...], outputs: tuple[TensorShape | None, ...],
    args: tuple[Arg, ...],
) -> int:
    work = work_of(op, operands, outputs, dict(zip(argument_names(op), args, strict=True)))
    return compute_ns(prices.cluster.device, work)


@dataclass(frozen=True)
class Static:
    """Bytes that live through the whole step: stored parameters and buffers, gradients, optimizer state."""

    parameters: int
    gradients: int
    optimizer: int


def replay_static(
    program: Program, local: LocalProgram, optimizer_bytes: OptimizerBytes, last: LocalProgram | None = None
) -> Static:
    """Bytes of the stored shards of one rank: ``local`` has the program's inputs, ``last`` its outputs (None: it)."""
    last = last or local
    parameters = gradients = optimizer = 0
    for item, value in zip(program.inputs, local.inputs, strict=True):
        kind = local.types[value]
        if item.kind in ("parameter", "buffer"):
            parameters += bytes_of(kind)
        if item.kind == "parameter" and item.requires_grad:
            optimizer += optimizer_bytes(kind.dtype, item.name) * math.prod(kind.shape)
    for output, value in zip(program.outputs, last.outputs, strict=True):
        if output.kind == "gradient":
            gradients += bytes_of(last.types[value])
    return Static(parameters, gradients, optimizer)
