"""A program that repeats in time -> what a rank runs in one step of several microbatches, as four local programs.

    prologue      once    whole inputs, constants, held parameters      -> hoisted values (counts, masks, held copies)
    forward       M times inputs of one microbatch, hoisted             -> early results, saved
    backward      M times saved, tangent, totals                        -> late results, totals (added to in place)
    epilogue      once    totals, joined results, hoisted               -> the program's outputs in their layouts

A step runs ``prologue``, then forward and backward of every microbatch in any order in which each forward comes before
its backward (a pipeline's schedule, or one after the other), then ``epilogue``. What forward and backward of a
microbatch exchange is theirs alone; ``totals`` (zeros at first, one tensor a rank) are shared by all backwards.
Gradients are added up as backward leaves them, and what brings them into their layout (all-reduce, reduce-scatter) runs
in the epilogue; those in ``Decisions.reduce_each`` are brought there by every backward and added up after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from fxpar.plans.errors import PlanFileError
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Join, Microbatches, Program
from fxpar.runtime.local import AddStep, AnyStep, CollectiveStep, LocalProgram, OpStep, WaitStep
from fxpar.runtime.rewrite.legality import check, collective_signature, structure
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.passes import PASSES

LINEAR_COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all"})
# ops of one tensor that only show it otherwise: what is added up may be added up before them
LINEAR_VIEWS = frozenset({
    "aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.view.default", "aten._unsafe_view.default",
    "aten.unsqueeze.default", "aten.squeeze.dim", "aten.detach.default", "aten.alias.default", "aten.clone.default",
})


@dataclass(frozen=True)
class Joined:
    """A local value that every microbatch makes anew, and how the step's comes of them."""

    value: int
    join: Join


@dataclass(frozen=True)
class Pieces:
    """One rank's step in parts; all value numbers are those of one local program.

    ``prologue.inputs`` are the program inputs at ``prologue_inputs``, its outputs ``hoisted``.
    ``forward.inputs``: the program inputs at ``forward_inputs`` (of one microbatch), then ``hoisted``; its outputs the
    values of ``early``, then ``saved``.
    ``backward.inputs``: ``saved``, the tangent if the program has one, then ``totals``; its outputs the values of
    ``late``, then the totals, the very tensors that came in.
    ``epilogue.inputs``: ``totals``, the joined values of ``early`` and ``late``, then ``hoisted``; its outputs the
    program's, in order.

    Attributes:
        prologue_inputs, forward_inputs: positions in ``Program.inputs``.
        hoisted: local values.
        saved: local values that cross from forward to backward, program inputs and hoisted ones among them.
        totals: the local values that are added up in backward: zeros of their local types at a step's begin.
        early, late: results that whoever runs the microbatches joins.
    """

    time: Microbatches
    prologue: LocalProgram
    forward: LocalProgram
    backward: LocalProgram
    epilogue: LocalProgram
    prologue_inputs: tuple[int, ...]
    forward_inputs: tuple[int, ...]
    hoisted: tuple[int, ...]
    saved: tuple[int, ...]
    totals: tuple[int, ...]
    early: tuple[Joined, ...]
    late: tuple[Joined, ...]

    @property
    def programs(self) -> tuple[LocalProgram, LocalProgram, LocalProgram, LocalProgram]:
        """In the order in which they first run."""
        return self.prologue, self.forward, self.backward, self.epilogue


def pieces(program: Program, decisions: Decisions, coords: tuple[int, ...]) -> Pieces:
    """What the rank at ``coords`` runs of a program that repeats in time.

    Simulate, verify and the runtime all use this one function, as they do ``rewrite`` of programs that do not repeat.

    Raises:
        PlanFileError: the decisions do not fit the program, or it does not repeat.
    """
    return split_pieces(program, decisions, localise(program, decisions, coords))


def split_pieces(program: Program, decisions: Decisions, local: LocalProgram) -> Pieces:
    """The pieces of ``local``, which :func:`~fxpar.runtime.rewrite.localise.localise` made; every pass is run."""
    time = program.time
    if time is None:
        raise PlanFileError("the program does not repeat in time", way_out="use rewrite for it")
    hoisted_steps = _hoisted_steps(program, decisions, local)
    late_steps = _late_steps(program, decisions, local)
    prologue, body, epilogue = [], [], []
    for step in local.steps:
        if id(step) in hoisted_steps:
            prologue.append(replace(step, phase="forward"))
        elif id(step) in late_steps:
            epilogue.append(step)
        else:
            body.append(step)
    made_first = {v for s in prologue for v in s.writes}
    made_last = {v for s in epilogue for v in s.writes}
    # what the epilogue reads, or what leaves as it is: joined over microbatches, unless the prologue made it
    joins: dict[int, Join] = {}
    for step in epilogue:
        joins.update((v, "sum") for v in step.reads if v not in made_last)
    for value, join in zip(local.outputs, time.outputs, strict=True):
        if value not in made_last and value not in made_first:
            joins.setdefault(value, join)
    wanted = {v for s in (*body, *epilogue) for v in s.reads} | set(local.outputs)
    hoisted = tuple(sorted(made_first & wanted))
    first = _passed(replace(local, steps=tuple(prologue), outputs=hoisted))
    used = {v for s in first.steps for v in s.reads}
    prologue_inputs = tuple(i for i, v in enumerate(local.inputs) if v in used)
    middle = _passed(replace(local, inputs=(*local.inputs, *hoisted), steps=tuple(body), outputs=tuple(joins)))
    forward, backward, forward_inputs, saved, totals, early, late = _halves(program, middle, local, hoisted, joins)
    last = replace(
        local, inputs=(*totals, *(j.value for j in (*early, *late)), *hoisted), steps=tuple(epilogue),
    )
    return Pieces(
        time, replace(first, inputs=tuple(local.inputs[i] for i in prologue_inputs)), forward, backward,
        _passed(last), prologue_inputs, forward_inputs, hoisted, saved, totals, early, late,
    )


def _passed(local: LocalProgram) -> LocalProgram:
    passes: tuple[Callable[[LocalProgram], LocalProgram], ...] = PASSES
    for one in passes:
        local = one(local)
    return check(local)


def _hoisted_steps(program: Program, decisions: Decisions, local: LocalProgram) -> set[int]:
    """Identities of the steps that run once: those of ``once`` nodes, those that follow from held parameters alone, and
    reshards of what is the same in every microbatch (of parameters only where they are held)."""
    assert program.time is not None
    once, held = frozenset(program.time.once), frozenset(decisions.held)
    from_held = {local.inputs[i] for i in held}
    same = set(from_held)
    written = {o.name for o, join in zip(program.outputs, program.time.outputs, strict=True) if join == "chain"}
    for position, (entry, cut) in enumerate(zip(program.inputs, program.time.inputs, strict=True)):
        changing = entry.kind in ("parameter", "tangent", "seed", "microbatch") or (
            entry.kind == "buffer" and entry.name in written)
        if not changing and cut < 0:
            same.add(local.inputs[position])
    found: set[int] = set()
    for step in local.steps:
        reads = set(step.reads)
        derived = bool(reads) and reads <= from_held
        if isinstance(step, OpStep):
            hoist = step.node in once or derived
        else:
            hoist = reads <= same
        if hoist:
            found.add(id(step))
            same.update(step.writes)
            if derived:
                from_held.update(step.writes)
    return found


def _late_steps(program: Program, decisions: Decisions, local: LocalProgram) -> set[int]:
    """Identities of the steps that bring gradients into their layout at the end of the step."""
    assert program.time is not None
    each = frozenset(decisions.reduce_each)
    readers: dict[int, list[AnyStep]] = {}
    for step in local.steps:
        for value in set(step.reads):
            readers.setdefault(value, []).append(step)
    leaving: dict[int, bool] = {}  # value -> may it be made in the epilogue
    for position, (output, value) in enumerate(zip(program.outputs, local.outputs, strict=True)):
        end = output.kind == "gradient" and position not in each and program.time.outputs[position] == "sum"
        leaving[value] = leaving.get(value, True) and end
    late: dict[int, bool] = {}  # identity -> does a collective follow, itself included
    for step in reversed(local.steps):
        if step.phase != "backward" or not _linear(step):
            continue
        if not all(leaving.get(v, True) for v in step.writes):
            continue
        after = [s for v in step.writes for s in readers.get(v, ())]
        if not all(id(s) in late for s in after) or not (after or any(v in leaving for v in step.writes)):
            continue
        late[id(step)] = isinstance(step, CollectiveStep) or any(late[id(s)] for s in after)
    moved: set[int] = set()
    made: set[int] = set()
    for step in local.steps:
        if late.get(id(step), False) or (id(step) in late and not made.isdisjoint(step.reads)):
            moved.add(id(step))
            made.update(step.writes)
    return moved


def _linear(step: AnyStep) -> bool:
    if isinstance(step, OpStep):
        return step.op in LINEAR_VIEWS and len(step.operands) == 1
    if isinstance(step, CollectiveStep):
        return step.kind in LINEAR_COLLECTIVES and step.reduce == "sum"
    return True


_Halves = tuple[
    LocalProgram, LocalProgram, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[Joined, ...],
    tuple[Joined, ...],
]


def _halves(
    program: Program, body: LocalProgram, local: LocalProgram, hoisted: tuple[int, ...], joins: dict[int, Join]
) -> _Halves:
    """(forward, backward, forward_inputs, saved, totals, early, late) of one microbatch."""
    tangents = [i for i, entry in enumerate(program.inputs) if entry.kind == "tangent"]
    forward_steps = tuple(s for s in body.steps if s.phase == "forward")
    backward_steps = tuple(s for s in body.steps if s.phase == "backward")
    made_late = {v for s in backward_steps for v in s.writes} | {local.inputs[i] for i in tangents}
    totals = tuple(v for v, join in joins.items() if join == "sum" and v in made_late)
    early = tuple(Joined(v, join) for v, join in joins.items() if v not in made_late)
    late = tuple(Joined(v, join) for v, join in joins.items() if v in made_late and join != "sum")
    types, origins = list(body.types), list(body.origins)

    def another(value: int) -> int:
        types.append(types[value])
        origins.append(origins[value])
        return len(types) - 1

    entering = {v: another(v) for v in totals}
    leaving = {v: another(v) for v in totals}
    steps = _with_additions(backward_steps, entering, leaving)
    read = dict.fromkeys([*(v for s in backward_steps for v in s.reads), *(j.value for j in late)])
    saved = tuple(v for v in read if v not in made_late)
    forward_inputs = tuple(i for i in range(len(program.inputs)) if i not in set(tangents))
    shared = replace(body, types=tuple(types), origins=tuple(origins))
    forward = replace(
        shared, inputs=(*(local.inputs[i] for i in forward_inputs), *hoisted), steps=forward_steps,
        outputs=(*(j.value for j in early), *saved),
    )
    backward = replace(
        shared, inputs=(*saved, *(local.inputs[i] for i in tangents), *entering.values()), steps=steps,
        outputs=(*(j.value for j in late), *leaving.values()),
    )
    return check(forward), check(backward), forward_inputs, saved, totals, early, late


def _with_additions(
    steps: tuple[AnyStep, ...], entering: dict[int, int], leaving: dict[int, int]
) -> tuple[AnyStep, ...]:
    """``steps`` with every total added to: right where an op made the summand; where a collective did, after the wait
    for it or at the end (who reads its result waits for it)."""
    found: list[AnyStep] = []
    waiting: dict[int, AnyStep] = {}
    left = dict(entering)

    def addition(value: int) -> AnyStep:
        return AddStep(left.pop(value), value, leaving[value], "backward")

    for step in steps:
        found.append(step)
        for value in step.writes:
            if value in left and isinstance(step, CollectiveStep):
                waiting[value] = addition(value)
            elif value in left:
                found.append(addition(value))
        if isinstance(step, WaitStep):
            found += [waiting.pop(v) for v in step.values if v in waiting]
    # a tangent may itself be a gradient
    return (*found, *waiting.values(), *(addition(v) for v in tuple(left)))


def signature(parts: Pieces) -> str:
    """Hash of all collectives of a step, equal on all ranks (see ``legality.collective_signature``)."""
    text = "\n".join(collective_signature(p) for p in parts.programs)
    return hashlib.sha256(f"{parts.time.count}\n{text}".encode()).hexdigest()


def pieces_structure(parts: Pieces) -> tuple[object, ...]:
    """What must not depend on the rank (see ``legality.structure``)."""
    return tuple(structure(p) for p in parts.programs)
