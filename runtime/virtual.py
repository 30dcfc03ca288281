"""All ranks of a mesh in lockstep in one process: the rewritten programs run as they are, collectives become an
exchange among the ranks' tensors.

Goes in: a program, decisions and global inputs. Comes out: global outputs, and how far replicas disagree (0.0 when the
plan is sound: every rank computes a replicated value from the same numbers in the same order).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from fxpar.plans.layout import Layout
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program
from fxpar.runtime.interpret import operator_of
from fxpar.runtime.local import (
    AddStep,
    CollectiveStep,
    Cut,
    Halo,
    LocalProgram,
    LocalStep,
    OpStep,
    Swap,
    WaitStep,
    last_uses,
    torch_dtype,
)
from fxpar.runtime.op_call import call_arguments, results
from fxpar.runtime.packing import (
    exchange_sizes,
    halo_sizes,
    local_slice,
    pack_exchange,
    pack_gathers,
    pack_halo,
    pack_row,
    pack_scatters,
    unpack_exchange,
    unpack_gathers,
    unpack_halo,
    unpack_row,
    unpack_scatters,
)
from fxpar.runtime.pieces import assemble, input_of_microbatch, join_microbatches, replica_disagreement, scatter
from fxpar.runtime.rewrite.legality import collective_signature, structure
from fxpar.runtime.rewrite.microbatches import Pieces, pieces, pieces_structure, signature
from fxpar.runtime.rewrite.passes import rewrite

Row = list[torch.Tensor]
"""One tensor per rank."""

_CPU = torch.device("cpu")
_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class VirtualResult:
    """Attributes:
    outputs: one global tensor per program output.
    disagreement: per output, the largest difference between replicas.
    pieces: per output, the local tensor of every rank.
    programs: the local program of every rank.
    """

    outputs: tuple[torch.Tensor, ...]
    disagreement: tuple[float, ...]
    pieces: tuple[tuple[torch.Tensor, ...], ...]
    programs: tuple[LocalProgram, ...]


def rewrite_all(program: Program, decisions: Decisions) -> tuple[LocalProgram, ...]:
    """The local program of every rank, in rank order, checked to be one sequence of steps.

    Raises:
        ValueError: two ranks would not run the same sequence (a defect of a rule's local call).
    """
    mesh = decisions.mesh
    programs = tuple(rewrite(program, decisions, mesh.coordinates(rank)) for rank in range(mesh.world_size))
    if len({structure(p) for p in programs}) != 1 or len({collective_signature(p) for p in programs}) != 1:
        raise ValueError("the ranks' programs are not the same sequence of steps")
    return programs


Watch = Callable[[int, torch.Tensor], None]
"""Told every global value (id, tensor assembled from the ranks) when a step has made it."""


@torch.no_grad()
def run_virtual(
    program: Program, decisions: Decisions, inputs: Mapping[int, torch.Tensor], watch: Watch | None = None
) -> VirtualResult:
    """Run one step on every rank; of a program that repeats in time, all its microbatches.

    Args:
        program: with logical dims.
        decisions: one choice per node, a layout per input and output.
        inputs: the global tensor of every program input, by value id.
        watch: is told every value, to find where two runs part.

    Raises:
        PlanFileError: the decisions do not fit the program.
    """
    if decisions.pipeline is not None:
        from fxpar.runtime.virtual_stages import run_virtual_stages  # it is made of what is below

        return run_virtual_stages(program, decisions, inputs)
    if program.time is not None:
        return run_virtual_microbatches(program, decisions, inputs, watch)
    mesh = decisions.mesh
    programs = rewrite_all(program, decisions)
    first = programs[0]
    state: dict[int, Row] = {}
    for entry, layout, local in zip(program.inputs, decisions.inputs, first.inputs, strict=True):
        dims = program.dims[entry.value]
        state[local] = [
            scatter(inputs[entry.value], dims, layout, mesh, mesh.coordinates(rank)).contiguous()
            for rank in range(mesh.world_size)
        ]
    run_steps(program, programs, state, watch)
    return _result(program, decisions, tuple(tuple(state[v]) for v in first.outputs), programs)


def run_steps(
    program: Program, programs: Sequence[LocalProgram], state: dict[int, Row], watch: Watch | None
) -> None:
    """Run the ranks' programs on ``state``, in which only their outputs and what they do not read are left."""
    first = programs[0]
    for index, freed in enumerate(last_uses(first)):
        _run_step(index, programs, state, first.mesh)
        if watch is not None:
            for value in first.steps[index].writes:
                origin, layout = first.origins[value]
                if origin >= 0:
                    watch(origin, assemble(state[value], program.dims[origin], layout, first.mesh))
        for value in freed:
            del state[value]


def _result(
    program: Program, decisions: Decisions, pieces: tuple[tuple[torch.Tensor, ...], ...],
    programs: tuple[LocalProgram, ...],
) -> VirtualResult:
    mesh = decisions.mesh
    return VirtualResult(
        tuple(
            joined_parts(p, program, i, layout, mesh)
            for i, (p, layout) in enumerate(zip(pieces, decisions.outputs, strict=True))
        ),
        tuple(replica_disagreement(p, layout, mesh) for p, layout in zip(pieces, decisions.outputs, strict=True)),
        pieces,
        programs,
    )


def joined_parts(
    pieces: Sequence[torch.Tensor], program: Program, position: int, layout: Layout, mesh: Mesh
) -> torch.Tensor:
    """The global tensor of an output from all ranks' results. What microbatches are concatenated along a dim is whole
    on every rank where ranks hold whole rows of each of them; else it is put together microbatch by microbatch."""
    join = program.time.outputs[position] if program.time is not None else "sum"
    dims = program.dims[program.outputs[position].value]
    if not isinstance(join, int):
        return assemble(pieces, dims, layout, mesh)
    rows = [piece.chunk(program.microbatches, join) for piece in pieces]
    return torch.cat([assemble(row, dims, layout, mesh) for row in zip(*rows, strict=True)], join)


def pieces_of_all(program: Program, decisions: Decisions) -> tuple[Pieces, ...]:
    """The pieces of every rank, in rank order, checked to be one sequence of steps.

    Raises:
        ValueError: two ranks would not run the same sequence (a defect of a rule's local call).
    """
    mesh = decisions.mesh
    parts = tuple(pieces(program, decisions, mesh.coordinates(rank)) for rank in range(mesh.world_size))
    if len({pieces_structure(p) for p in parts}) != 1 or len({signature(p) for p in parts}) != 1:
        raise ValueError("the ranks' programs are not the same sequence of steps")
    return parts


@torch.no_grad()
def run_virtual_microbatches(
    program: Program, decisions: Decisions, inputs: Mapping[int, torch.Tensor], watch: Watch | None = None
) -> VirtualResult:
    """:func:`run_virtual` of a program that repeats: prologue, microbatches one after the other, epilogue. ``inputs``
    hold the tensors of the WHOLE batch; a tensor that microbatches hand on (a buffer) enters as it was before them."""
    parts = pieces_of_all(program, decisions)
    first, mesh = parts[0], decisions.mesh
    handed_on = dict(inputs)

    def entering(programs: Sequence[LocalProgram], positions: Sequence[int], number: int) -> dict[int, Row]:
        rows: dict[int, Row] = {}
        for position, local in zip(positions, programs[0].inputs, strict=False):
            value = program.inputs[position].value
            whole = input_of_microbatch(program, position, handed_on, number)
            rows[local] = [
                scatter(whole, program.dims[value], decisions.inputs[position], mesh, mesh.coordinates(rank)).clone()
                for rank in range(mesh.world_size)
            ]
        return rows

    def run(which: int, state: dict[int, Row]) -> dict[int, Row]:
        run_steps(program, [p.programs[which] for p in parts], state, watch)
        return state

    once = run(0, entering([p.prologue for p in parts], first.prologue_inputs, 0))
    hoisted = {v: once[v] for v in first.hoisted}
    totals = first.backward.inputs[len(first.backward.inputs) - len(first.totals) :]
    sums = {
        v: [torch.zeros(p.backward.types[v].shape, dtype=torch_dtype(p.backward.types[v].dtype)) for p in parts]
        for v in totals
    }
    joined: dict[int, list[Row]] = {j.value: [] for j in (*first.early, *first.late)}
    tangents = [i for i, entry in enumerate(program.inputs) if entry.kind == "tangent"]
    for number in range(program.microbatches):
        state = run(1, entering([p.forward for p in parts], first.forward_inputs, number) | hoisted)
        late = {v: state[v] for v in first.saved}
        found = {j.value: state[j.value] for j in first.early}
        values = first.backward.inputs[len(first.saved) : len(first.saved) + len(tangents)]
        late |= {
            v: [handed_on[program.inputs[i].value].clone() for _ in parts]
            for v, i in zip(values, tangents, strict=True)
        }
        state = run(2, late | sums)
        found |= {j.value: state[j.value] for j in first.late}
        for value, row in found.items():
            joined[value].append([t.clone() for t in row])
        hand_on(program, decisions, first, found, handed_on)
    results = {
        j.value: [join_microbatches([row[rank] for row in joined[j.value]], j.join) for rank in range(mesh.world_size)]
        for j in (*first.early, *first.late)
    }
    ends = {v: sums[total] for v, total in zip(first.totals, totals, strict=True)}
    last = run(3, hoisted | results | ends)
    return _result(
        program, decisions, tuple(tuple(last[v]) for v in first.epilogue.outputs), tuple(p.forward for p in parts)
    )


def hand_on(
    program: Program, decisions: Decisions, parts: Pieces, found: Mapping[int, Row],
    values: dict[int, torch.Tensor],
) -> None:
    """Enter the buffers that a microbatch leaves to the next."""
    by_name = {i.name: i.value for i in program.inputs if i.kind == "buffer"}
    for position, output in enumerate(program.outputs):
        if parts.time.outputs[position] == "chain":
            row = found[parts.epilogue.outputs[position]]
            values[by_name[output.name]] = assemble(
                row, program.dims[output.value], decisions.outputs[position], decisions.mesh)


def _run_step(index: int, programs: Sequence[LocalProgram], state: dict[int, Row], mesh: Mesh) -> None:
    steps = [p.steps[index] for p in programs]
    step = steps[0]
    if isinstance(step, OpStep):
        rows = [_run_op(s, state, rank) for rank, s in enumerate(steps) if isinstance(s, OpStep)]
        for position, value in enumerate(step.outputs):
            if value >= 0:
                state[value] = [row[position] for row in rows]
    elif isinstance(step, LocalStep):
        state[step.output] = [
            _run_local(s, state[s.value][rank], programs[rank].types[s.output].shape)
            for rank, s in enumerate(steps)
            if isinstance(s, LocalStep)
        ]
    elif isinstance(step, AddStep):
        totals = state[step.total]
        state[step.output] = [t.add_(v) for t, v in zip(totals, state[step.value], strict=True)]
    elif not isinstance(step, WaitStep):  # in lockstep a collective is done where it stands
        found: dict[int, list[torch.Tensor]] = {}
        for group in mesh.groups((step.axis,)):
            own = [s for rank in group if isinstance(s := steps[rank], CollectiveStep)]
            shapes = [[programs[rank].types[v].shape for v in step.outputs] for rank in group]
            tensors = [[state[v][rank] for v in step.values] for rank in group]
            found.update(zip(group, exchange(own, tensors, shapes), strict=True))
        for position, value in enumerate(step.outputs):
            state[value] = [found[rank][position] for rank in range(mesh.world_size)]


def _run_op(step: OpStep, state: dict[int, Row], rank: int) -> tuple[torch.Tensor, ...]:
    values = {v: state[v][rank] for v in step.operands}
    positional, named = call_arguments(step.op, step.args, values, _CPU)
    return results(operator_of(step.op)(*positional, **named), len(step.outputs))


def _run_local(step: LocalStep, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if step.kind == "to_partial":
        return tensor if step.keep else torch.zeros_like(tensor)
    return local_slice(tensor, step.outer, step.start, step.length, step.inner, shape)


def exchange(
    steps: Sequence[CollectiveStep], tensors: Sequence[Row], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[Row]:
    """One collective of one group: per member its step, its tensors and the shapes of its results, in; results out.

    Buffers are packed, moved and trimmed exactly as on real ranks.
    """
    kind, combine = steps[0].kind, _REDUCE[steps[0].reduce]
    members = range(len(steps))
    if kind == "all_reduce":
        total = reduce(combine, [pack_row(row) for row in tensors])
        return [unpack_row(total.clone(), shapes[i]) for i in members]
    if kind == "all_to_all":
        swaps = [g for s in steps for g in s.geometries if isinstance(g, Swap)]
        sent = [pack_exchange(tensors[i][0], swaps[i], i).split(exchange_sizes(swaps[i], i)[0]) for i in members]
        received = [torch.cat([sent[peer][i] for peer in members]) for i in members]
        return [[unpack_exchange(received[i], swaps[i], i, shapes[i][0])] for i in members]
    if kind in ("halo", "halo_sum"):
        halos = [g for s in steps for g in s.geometries if isinstance(g, Halo)]
        return _exchange_halos(halos, [row[0] for row in tensors], [row[0] for row in shapes], kind == "halo_sum")
    cuts = [[g for g in s.geometries if isinstance(g, Cut)] for s in steps]
    if kind == "all_gather":
        gathered = torch.cat([pack_gathers(tensors[i], cuts[i], i).view(-1) for i in members])
        return [unpack_gathers(gathered.clone(), cuts[i], shapes[i]) for i in members]
    summed = reduce(combine, [pack_scatters(tensors[i], cuts[i]).view(-1) for i in members]).chunk(len(steps))
    return [unpack_scatters(summed[i], cuts[i], i, shapes[i]) for i in members]


def _exchange_halos(
    halos: Sequence[Halo], tensors: Row, shapes: Sequence[tuple[int, ...]], summed: bool
) -> list[Row]:
    members = range(len(halos))
    sent = [pack_halo(tensors[i], halos[i], i, summed).split(halo_sizes(halos[i], i, summed)[0]) for i in members]
    received = [torch.cat([sent[peer][i] for peer in members]) for i in members]
    return [[unpack_halo(received[i], tensors[i], halos[i], i, summed, shapes[i])] for i in members]
