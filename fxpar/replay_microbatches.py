"""Time and memory of a step in microbatches: the pieces of one rank, replayed without tensors.

Time: prologue and epilogue once, forward and backward of a microbatch as often as there are. Memory: all pieces one
after the other as one program with one microbatch, in which the totals are there from the start and what the prologue
made stays until the last microbatch is done: no other moment of the step holds more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from fxpar.plans.plan import CollectiveTotal
from fxpar.plans.program import Arg, Program, Ref, map_refs
from fxpar.replay_memory import Memory, Stays, gradient_positions, replay_memory, storage_roots
from fxpar.runtime.local import (
    AddStep,
    AnyStep,
    CollectiveStep,
    LocalProgram,
    LocalStep,
    OpStep,
    WaitStep,
    type_bytes,
)
from fxpar.runtime.rewrite.microbatches import Pieces
from fxpar.timeline import Timeline


def in_sequence(program: Program, parts: Pieces) -> tuple[LocalProgram, Stays]:
    """A step with one microbatch as one local program, and what stays in it for how long."""
    backward = parts.backward
    count = len(parts.totals)
    split = len(backward.inputs) - count
    entering = backward.inputs[split:]
    leaving = dict(zip(parts.totals, backward.outputs[len(backward.outputs) - count :], strict=True))
    steps = (*parts.prologue.steps, *parts.forward.steps, *backward.steps)
    epilogue = tuple(_renamed(step, leaving) for step in parts.epilogue.steps)
    inputs = dict.fromkeys((
        *parts.prologue.inputs, *parts.forward.inputs[: len(parts.forward_inputs)],
        *backward.inputs[len(parts.saved) : split], *entering,
    ))
    outputs = tuple(leaving.get(v, v) for v in parts.epilogue.outputs)
    whole = replace(
        backward, inputs=tuple(inputs), steps=(*steps, *epilogue),
        # what microbatches leave is there until it is joined
        outputs=(*outputs, *(j.value for j in (*parts.early, *parts.late))),
    )
    return whole, Stays(frozenset(entering), parts.hoisted, len(steps))


def _renamed(step: AnyStep, names: dict[int, int]) -> AnyStep:
    """A step that reads other values."""

    def new(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(names.get(v, v) for v in values)

    if isinstance(step, CollectiveStep | WaitStep):
        return replace(step, values=new(step.values))
    if isinstance(step, LocalStep):
        return replace(step, value=names.get(step.value, step.value))
    if isinstance(step, AddStep):
        return replace(step, value=names.get(step.value, step.value))
    return _renamed_op(step, names)


def _renamed_op(step: OpStep, names: dict[int, int]) -> OpStep:
    table: dict[int, Arg] = {old: Ref(new) for old, new in names.items()}
    return replace(
        step, args=tuple(map_refs(arg, table) for arg in step.args),
        operands=tuple(names.get(v, v) for v in step.operands),
    )


def replay_pieces_memory(program: Program, parts: Pieces) -> Memory:
    """What a rank holds in one step."""
    whole, stays = in_sequence(program, parts)
    found = replay_memory(whole, gradient_positions(program), stays)
    # of results that are concatenated, those of earlier microbatches are there beside the last one's
    earlier = (parts.time.count - 1) * sum(
        type_bytes(whole.types[j.value]) for j in (*parts.early, *parts.late) if isinstance(j.join, int)
    )
    return replace(found, peak=found.peak + earlier, activations=found.activations + earlier)


def kept_bytes(program: Program, local: LocalProgram, parts: Pieces) -> int:
    """Bytes that forward of one microbatch keeps for its backward: not what stays for the step anyway. What is kept of
    a tensor keeps all of it.

    Args:
        local: the program of the rank, which ``parts`` are the pieces of.
    """
    stays = set(parts.hoisted) | {
        v for v, e in zip(local.inputs, program.inputs, strict=True) if e.kind in ("parameter", "constant", "buffer")
    }
    root = storage_roots(parts.forward)
    kept = {root[v] for v in parts.saved} - {root[v] for v in stays}
    return sum(type_bytes(parts.forward.types[v]) for v in kept)


def sum_timelines(parts: Iterable[tuple[Timeline, int]]) -> Timeline:
    """Timelines one after the other, each so many times."""
    step = compute = communication = 0
    counts: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    spent: Counter[tuple[str, str]] = Counter()
    for timeline, times in parts:
        step += times * timeline.step_ns
        compute += times * timeline.compute_ns
        communication += times * timeline.communication_ns
        for total in timeline.totals:
            key = (total.kind, total.axis)
            counts[key] += times * total.count
            moved[key] += times * total.bytes
            spent[key] += times * total.ns
    totals = tuple(CollectiveTotal(*key, counts[key], moved[key], spent[key]) for key in sorted(counts))
    return Timeline(step, compute, communication, totals)
