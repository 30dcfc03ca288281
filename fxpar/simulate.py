"""What a plan will cost: the rewritten program of one rank, replayed without tensors.

The program replayed IS the one that runs (``fxpar.runtime.rewrite``), on the rank at coordinate 0 of every axis, which
holds the largest shards. Time: one compute stream in program order and one communication stream; a collective starts
when its operand is ready and the stream is free, and a step waits for the collectives it reads. Memory: bytes of live
local tensors, freed after their last reader; views and what they look at share storage.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from fxpar.cost.compute import Work, compute_ns
from fxpar.cost.op_work import TensorShape, tensor_bytes, work_of, workspace_bytes
from fxpar.plans.plan import CollectiveTotal, Decisions, Prediction
from fxpar.plans.program import Arg, Program, Ref, TensorType, map_refs
from fxpar.prices import Prices
from fxpar.rules.factor_rule import argument_names
from fxpar.runtime.interpret import operator_of
from fxpar.runtime.local import CollectiveStep, LocalProgram, LocalStep, OpStep, torch_dtype
from fxpar.runtime.op_call import call_arguments, results
from fxpar.runtime.rewrite.passes import rewrite

OptimizerBytes = Callable[[str, str], int]
META = torch.device("meta")


@dataclass(frozen=True)
class Timeline:
    """Result of replaying one local program: ns of the step, of compute, of all and of exposed communication."""

    step_ns: int
    compute_ns: int
    communication_ns: int
    totals: tuple[CollectiveTotal, ...]

    @property
    def exposed_ns(self) -> int:
        return self.step_ns - self.compute_ns


def simulate(program: Program, decisions: Decisions, prices: Prices, optimizer_bytes: OptimizerBytes) -> Prediction:
    """Time and memory of one training step under the decisions."""
    local = rewrite(program, decisions, (0,) * len(decisions.mesh.axes), every_pass=False)
    timeline = replay_time(local, prices)
    static = replay_static(program, local, optimizer_bytes)
    peak, activations = replay_memory(local, gradient_positions(program))
    return Prediction(
        step_ns=timeline.step_ns,
        compute_ns=timeline.compute_ns,
        communication_ns=timeline.communication_ns,
        exposed_ns=timeline.exposed_ns,
        peak_bytes=peak + static.optimizer,
        parameter_bytes=static.parameters,
        gradient_bytes=static.gradients,
        optimizer_bytes=static.optimizer,
        activation_bytes=activations,
        collectives=timeline.totals,
    )


def replay_time(local: LocalProgram, prices: Prices) -> Timeline:
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
            link = max(link, start, compute) + time
            communication += time
            done = link
            key = (step.kind, step.axis)
            counts[key] += 1
            moved[key] += step.bytes
            spent[key] += time
        else:
            time = local_step_ns(step, local, prices)
            compute = max(compute, start) + time
            busy += time
            done = compute
        for value in step.writes:
            ready[value] = done
    totals = tuple(
        CollectiveTotal(kind, local.mesh.axes[axis].name, counts[kind, axis], moved[kind, axis], spent[kind, axis])
        for kind, axis in sorted(counts)
    )
    end = max([compute, *(ready[v] for v in local.outputs)])
    return Timeline(end, busy, communication, totals)


def local_step_ns(step: OpStep | LocalStep, local: LocalProgram, prices: Prices) -> int:
    """Time of a step without communication."""
    if isinstance(step, LocalStep):
        kept = local.types[step.output]
        return compute_ns(prices.cluster.device, Work("memory", 0, 2 * _bytes(kept), kept.dtype))
    operands = tuple(_shape(local.types[v]) for v in step.operands)
    outputs = tuple(None if v < 0 else _shape(local.types[v]) for v in step.outputs)
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


def _shape(kind: TensorType) -> TensorShape:
    return TensorShape(kind.shape, kind.dtype)


def _bytes(kind: TensorType) -> int:
    return tensor_bytes(_shape(kind))


@dataclass(frozen=True)
class Static:
    """Bytes that live through the whole step: stored parameters and buffers, gradients, optimizer state."""

    parameters: int
    gradients: int
    optimizer: int


def replay_static(program: Program, local: LocalProgram, optimizer_bytes: OptimizerBytes) -> Static:
    """Bytes of the stored shards of one rank."""
    parameters = gradients = optimizer = 0
    for item, value in zip(program.inputs, local.inputs, strict=True):
        kind = local.types[value]
        if item.kind in ("parameter", "buffer"):
            parameters += _bytes(kind)
        if item.kind == "parameter" and item.requires_grad:
            optimizer += optimizer_bytes(kind.dtype, item.name) * math.prod(kind.shape)
    for output, value in zip(program.outputs, local.outputs, strict=True):
        if output.kind == "gradient":
            gradients += _bytes(local.types[value])
    return Static(parameters, gradients, optimizer)


def gradient_positions(program: Program) -> tuple[int, ...]:
    """Positions of the gradients among the program's outputs."""
    return tuple(i for i, o in enumerate(program.outputs) if o.kind == "gradient")


def replay_memory(local: LocalProgram, gradients: tuple[int, ...]) -> tuple[int, int]:
    """(peak, activations) in bytes: the most that is live at once (inputs included), and the most of it that is
    neither a program input nor a gradient."""
    peak, most_temporary, _ = _replay(local, gradients)
    return peak, most_temporary


def values_at_peak(local: LocalProgram, gradients: tuple[int, ...]) -> tuple[int, ...]:
    """The program values whose storage is live at the peak, neither program inputs nor gradients; one entry for each
    local tensor that holds one."""
    return tuple(local.origins[v][0] for v in _replay(local, gradients)[2] if local.origins[v][0] >= 0)


def _replay(local: LocalProgram, gradients: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """(peak, activations, local values that own what is live at the peak and is no input or gradient)."""
    root = storage_roots(local)
    last: dict[int, int] = {}
    for index, step in enumerate(local.steps):
        for value in (*step.reads, *step.writes):
            last[root[value]] = index
    for value in (*local.inputs, *local.outputs):
        last[root[value]] = len(local.steps)
    freed: dict[int, list[int]] = defaultdict(list)
    for value, index in last.items():
        freed[index].append(value)
    fixed = {root[v] for v in local.inputs} | {root[local.outputs[p]] for p in gradients}
    sizes = [_bytes(kind) for kind in local.types]
    for step in local.steps:
        if isinstance(step, CollectiveStep) and step.kind == "all_reduce":
            sizes[step.outputs[0]] = sum(sizes[v] for v in step.outputs)
    live = sum(sizes[v] for v in {root[v] for v in local.inputs})
    temporary = most_temporary = 0
    peak, at = live, -1
    made: dict[int, int] = {}
    for index, step in enumerate(local.steps):
        for value in step.writes:
            if root[value] == value:
                made[value] = index
                live += sizes[value]
                temporary += 0 if value in fixed else sizes[value]
        working = _workspace(step, local)
        if live + working > peak:
            peak, at = live + working, index
        most_temporary = max(most_temporary, temporary + working)
        for value in freed[index]:
            live -= sizes[value]
            temporary -= 0 if value in fixed else sizes[value]
    there = tuple(v for v, start in made.items() if v not in fixed and start <= at <= last[v])
    return peak, most_temporary, there


def _workspace(step: OpStep | LocalStep | CollectiveStep, local: LocalProgram) -> int:
    """Bytes that an op allocates for itself while it runs."""
    if not isinstance(step, OpStep) or not step.op.startswith("fxpar.experts"):
        return 0
    args = dict(zip(argument_names(step.op), step.args, strict=True))
    return workspace_bytes(step.op, [_shape(local.types[v]) for v in step.operands], args)


def storage_roots(local: LocalProgram) -> list[int]:
    """Per local value, the value whose storage it shares (itself when it owns it).

    Views are made of meta tensors, strides and all: a reshape of a transposed value is a copy, as it is when it runs.
    What any other op makes counts as contiguous.
    """
    root = list(range(len(local.types)))
    strided: dict[int, _Strided] = {}

    def laid_out(value: int) -> _Strided:
        if value not in strided:
            kind = local.types[value]
            strided[value] = _Strided(kind.shape, _contiguous(kind.shape), kind.dtype)
        return strided[value]

    for step in local.steps:
        if isinstance(step, OpStep) and step.operands and _may_share(step, local):
            numbers: dict[int, Arg] = {v: Ref(i) for i, v in enumerate(step.operands)}
            args = tuple(map_refs(arg, numbers) for arg in step.args)
            made = _viewed(step.op, args, tuple(laid_out(v) for v in step.operands), len(step.outputs))
            for value, (result, shares) in zip(step.outputs, made, strict=True):
                if value >= 0:
                    strided[value] = result
                    if shares:
                        root[value] = root[step.operands[0]]
        elif isinstance(step, LocalStep) and _keeps_whole(step):
            root[step.output] = root[step.value]
        elif isinstance(step, CollectiveStep) and step.kind == "all_reduce":
            for value in step.outputs:  # one buffer for the whole bucket
                root[value] = step.outputs[0]
    return root


class _Strided(NamedTuple):
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


@lru_cache(maxsize=20_000)
def _viewed(op: str, args: tuple[Arg, ...], operands: tuple[_Strided, ...], count: int) -> list[tuple[_Strided, bool]]:
    """Per result of a view: how it lies, and whether it shares the first operand's storage."""
    given = {
        i: torch.empty_strided(t.shape, t.stride, dtype=torch_dtype(t.dtype), device="meta")
        for i, t in enumerate(operands)
    }
    positional, named = call_arguments(op, args, given, META)
    found = []
    for tensor in results(operator_of(op)(*positional, **named), count):
        # an op may return the very tensor it is given
        shares = tensor is not None and (tensor._is_view() or tensor is given[0])
        lies = operands[0] if tensor is None else _Strided(
            tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))
        found.append((lies, shares))
    return found


def _keeps_whole(step: LocalStep) -> bool:
    """A chunk of the outer dim is a view of what it was cut from, and a kept summand is the value itself."""
    return step.outer == 1 if step.kind == "slice" else step.keep


def _may_share(step: OpStep, local: LocalProgram) -> bool:
    # convolution, attention and experts need their arguments to be counted, and are no views
    if step.op.startswith(("aten.convolution", "fxpar.attention", "fxpar.experts")):
        return False
    inputs = [_shape(local.types[v]) for v in step.operands]
    outputs = [None if v < 0 else _shape(local.types[v]) for v in step.outputs]
    return work_of(step.op, inputs, outputs, {}).kind == "view"
