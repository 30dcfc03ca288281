"""Bytes that the ranks of a pipeline hold: each action of a stage replayed by itself, then the schedule walked through.

A rank stores its stages' parameters and optimizer state, and from a stage's first backward on its gradients. Beside
that it holds, from action to action, what forward keeps of every microbatch in flight, between the two parts of a
backward what the first leaves to the second, and messages: those that come from the moment they are asked for, those
that go until something has come that was asked for later (see ``fxpar.runtime.stage_exchange``). While an action runs
it takes more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpar.plans.layout import local_shape
from fxpar.plans.program import TensorType
from fxpar.plans.schedule import SENDS, Action, Schedule, leaves_of, rank_of_stage
from fxpar.replay_memory import Stays, replay_memory, storage_roots
from fxpar.runtime.local import LocalProgram, type_bytes
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.stage_pieces import StagePieces
from fxpar.simulate import OptimizerBytes, Static, replay_static


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on one rank.

    Attributes:
        static: what is stored; ``stored``: of it each parameter, by position among the whole program's inputs.
        standing: what the prologue makes; ``totals``: gradients as microbatches add to them, at least as stored.
        kept: what forward keeps of a microbatch; ``halfway``: what the first part of its backward leaves to the second.
        takes: by kind of action, what it takes at most beside what is there when it begins.
        sent, returned: what goes to the next stage and to the one before; ``going``: of ``sent`` what is not kept.
    """

    static: Static
    stored: tuple[tuple[int, int], ...]
    standing: int
    totals: int
    kept: int
    halfway: int
    takes: tuple[tuple[str, int], ...]
    sent: int
    returned: int
    going: int


def stage_memory(parts: StagePieces, optimizer_bytes: OptimizerBytes) -> StageMemory:
    """Replay what a rank runs of a stage."""
    pieces, program, stage = parts.pieces, parts.stage.program, parts.stage
    whole = localise(program, parts.decisions, (0,) * len(parts.decisions.mesh.axes))
    static = replay_static(program, whole, optimizer_bytes, pieces.epilogue)
    types = pieces.forward.types

    def size(values: Iterable[int]) -> int:
        return sum(type_bytes(types[v]) for v in values)

    entering = dict(zip(pieces.forward.inputs, pieces.forward_inputs, strict=False))
    entered = pieces.backward.inputs
    hoisted, totals = set(pieces.hoisted), set(entered[len(entered) - len(pieces.totals) :])
    stored = {v for v, i in entering.items() if program.inputs[i].kind in ("parameter", "buffer")}
    # taken again where backward reads it: not a microbatch's to keep
    again = stored | {
        v for v, i in entering.items()
        if program.inputs[i].kind == "constant" or (program.inputs[i].kind == "input" and stage.inputs[i] >= 0)
    }
    at_hand = stored | hoisted | totals  # there before an action and after it
    kept = set(pieces.saved) - hoisted - again

    def beside(local: LocalProgram, own: set[int]) -> int:
        """Most that a piece takes beside what is at hand and ``own``, which go as they are read."""
        mine = own & set(local.inputs)
        peak = replay_memory(local, (), Stays(temporary=frozenset(local.inputs) - at_hand)).peak
        return max(peak - size(at_hand & set(local.inputs)) - size(mine), 0)

    forward_root, first_root = storage_roots(pieces.forward), storage_roots(parts.backward_inputs)
    later = set(parts.backward_weights.inputs) - at_hand - again
    others = {forward_root[v] for v in again | hoisted}
    kept_roots = {forward_root[v] for v in kept} - others
    kept_size = size(kept_roots)
    halfway = size({forward_root[first_root[v]] for v in later} - others)
    hoisted_root = storage_roots(pieces.prologue)
    made = {hoisted_root[v] for v in hoisted} - set(pieces.prologue.inputs)

    def handed(positions: tuple[int, ...]) -> int:
        total = 0
        for position in positions:
            value, layout = program.outputs[position].value, parts.decisions.outputs[position]
            shape = local_shape(program.dims[value], layout, pieces.forward.mesh, pieces.forward.coords)
            total += type_bytes(TensorType(shape, program.types[value].dtype))
        return total

    takes = {
        "UNSHARD": max(beside(pieces.prologue, set()) - size(made), 0), "F": beside(pieces.forward, set()),
        "B": beside(parts.backward, kept), "I": beside(parts.backward_inputs, kept),
        "W": beside(parts.backward_weights, later), "REDUCE_GRAD": beside(parts.epilogue, set(pieces.totals)),
    }
    stored_sizes = tuple(
        (i, size((v,))) for i, v, e in zip(stage.inputs, whole.inputs, program.inputs, strict=True)
        if e.kind == "parameter"
    )
    return StageMemory(
        static, stored_sizes, size(made), max(size(totals), static.gradients), kept_size, halfway,
        tuple(takes.items()), handed(stage.sent), handed(stage.gradients_sent),
        size({forward_root[v] for v in parts.sent} - kept_roots - others),
    )


def rank_peaks(schedule: Schedule, stages: Sequence[StageMemory]) -> tuple[int, ...]:
    """Per rank of the pipeline the most bytes that it holds."""
    found = []
    for rank in range(len(schedule.ranks)):
        static = rank_static(schedule, stages, rank)
        found.append(static.parameters + static.optimizer + _most_held(schedule, stages, rank))
    return tuple(found)


def rank_static(schedule: Schedule, stages: Sequence[StageMemory], rank: int) -> Static:
    """What a rank's stages store; a parameter that several of them read is stored once."""
    mine = [stages[s] for s, place in enumerate(rank_of_stage(schedule)) if place == rank]
    stored = dict(pair for one in mine for pair in one.stored)
    twice = sum(size for one in mine for _, size in one.stored) - sum(stored.values())
    return Static(
        sum(one.static.parameters for one in mine) - twice, sum(one.static.gradients for one in mine),
        sum(one.static.optimizer for one in mine),
    )


def _most_held(schedule: Schedule, stages: Sequence[StageMemory], rank: int) -> int:
    """Most bytes of a rank beside parameters and optimizer state."""
    places = rank_of_stage(schedule)
    held = most = sum(one.standing for one, place in zip(stages, places, strict=True) if place == rank)
    learning: set[int] = set()  # stages that have begun with backward
    asked: dict[tuple[int, str, int], int] = {}  # what comes: how much had been sent to its rank when it was asked for
    going: dict[int, list[int]] = {}  # per rank what was sent to it; 0 once it is known to have arrived

    def handed(a: Action, step: int) -> int:
        """Bytes that ``a`` reads of the stage ``step`` further."""
        if not 0 <= a.stage + step < len(places):
            return 0
        return stages[a.stage + step].sent if step < 0 else stages[a.stage + step].returned

    for a in leaves_of(schedule)[rank]:
        one = stages[a.stage]
        if a.kind in SENDS:
            peer = places[a.stage + (1 if a.kind == "SEND_F" else -1)]
            size = one.going if a.kind == "SEND_F" else one.returned
            going.setdefault(peer, []).append(size)
            held += size
        elif a.kind in SENDS.values():
            step = -1 if a.kind == "RECV_F" else 1
            asked[a.stage, a.kind[-1], a.microbatch] = len(going.get(places[a.stage + step], ()))
            held += handed(a, step)
        elif a.kind in ("F", "B", "I"):
            step = -1 if a.kind == "F" else 1
            before = asked.get((a.stage, "F" if a.kind == "F" else "B", a.microbatch))
            if before is not None:
                # it is the action's own now; and what was sent there before it was asked for has arrived
                there = going.get(places[a.stage + step], [])
                held -= handed(a, step) + sum(there[:before])
                there[:before] = [0] * before
        if a.kind in ("B", "W") and a.stage not in learning:
            learning.add(a.stage)
            held += one.totals
        most = max(most, held + dict(one.takes).get(a.kind, 0))
        held += {"F": one.kept, "B": -one.kept, "I": one.halfway - one.kept, "W": -one.halfway}.get(a.kind, 0)
        most = max(most, held)
    return most
