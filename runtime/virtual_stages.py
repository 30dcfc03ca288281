"""A plan with stages on virtual ranks: its stages one after the other, microbatch by microbatch, in one process.

What crosses between stages goes over rank by rank as on real ranks; the schedule's order and its sends are not run (see
``fxpar.plans.schedule``). Every other microbatch runs its backward in two parts, as zero-bubble schedules do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program
from fxpar.runtime.local import LocalProgram, torch_dtype
from fxpar.runtime.pieces import input_of_microbatch, join_microbatches, replica_disagreement, scatter
from fxpar.runtime.rewrite.legality import collective_signature, structure
from fxpar.runtime.rewrite.stage_pieces import StagePieces, stage_decisions, stage_mesh, stage_pieces, stages_of
from fxpar.runtime.virtual import Row, VirtualResult, hand_on, joined_parts, run_steps


def pieces_of_stages(program: Program, decisions: Decisions) -> tuple[tuple[StagePieces, ...], ...]:
    """Per stage, what every rank of its mesh runs, checked to be one sequence of steps.

    Raises:
        PlanFileError: the decisions do not fit the program.
        ValueError: two ranks would not run the same sequence (a defect of a rule's local call).
    """
    mesh, stages = stage_mesh(decisions), stages_of(program, decisions)
    found = []
    for stage, decided in zip(stages.stages, stage_decisions(program, decisions, stages), strict=True):
        parts = tuple(stage_pieces(stage, decided, mesh.coordinates(rank)) for rank in range(mesh.world_size))
        same = {tuple((structure(p), collective_signature(p)) for p in part.programs) for part in parts}
        if len(same) != 1:
            raise ValueError("the ranks' programs are not the same sequence of steps")
        found.append(parts)
    return tuple(found)


class _VirtualStage:
    """One stage on all ranks of its mesh."""

    def __init__(
        self, parts: tuple[StagePieces, ...], inputs: Mapping[int, torch.Tensor], mesh: Mesh
    ) -> None:
        self.parts, self.first, self.mesh = parts, parts[0], mesh
        self.stage, self.program, self.pieces = parts[0].stage, parts[0].stage.program, parts[0].pieces
        own = {e.value: self.stage.values[e.value] for e in self.program.inputs}
        self.inputs = {value: inputs[whole] for value, whole in own.items() if whole in inputs}
        pieces = self.pieces
        state = self.entering(pieces.prologue_inputs, pieces.prologue.inputs, 0)
        self.run([p.pieces.prologue for p in parts], state)
        self.hoisted = {v: state[v] for v in pieces.hoisted}
        self.totals_in = pieces.backward.inputs[len(pieces.backward.inputs) - len(pieces.totals) :]
        self.totals: dict[int, Row] = {
            v: [torch.zeros(p.pieces.backward.types[v].shape, dtype=torch_dtype(pieces.backward.types[v].dtype))
                for p in parts] for v in self.totals_in
        }
        self.joined: dict[int, list[Row]] = {j.value: [] for j in (*pieces.early, *pieces.late)}
        self.saved: dict[int, Row] = {}
        self.early: dict[int, Row] = {}

    def run(self, programs: Sequence[LocalProgram], state: dict[int, Row]) -> None:
        run_steps(self.program, programs, state, None)

    def entering(self, positions: Sequence[int], values: Sequence[int], number: int) -> dict[int, Row]:
        """Inputs that come from no other stage."""
        rows: dict[int, Row] = {}
        for position, local in zip(positions, values, strict=False):
            entry = self.program.inputs[position]
            if self.stage.inputs[position] < 0:
                continue
            if entry.kind == "seed" and not self.program.types[entry.value].shape:
                whole = self.inputs[entry.value]
            else:
                whole = input_of_microbatch(self.program, position, self.inputs, number)
            dims, layout = self.program.dims[entry.value], self.first.decisions.inputs[position]
            rows[local] = [scatter(whole, dims, layout, self.mesh, self.mesh.coordinates(rank)).clone()
                           for rank in range(self.mesh.world_size)]
        return rows

    def forward(self, number: int, received: Sequence[Row]) -> list[Row]:
        pieces = self.pieces
        state = self.entering(pieces.forward_inputs, pieces.forward.inputs, number) | self.hoisted
        given = dict(zip(self.stage.received, received, strict=True))
        for position, local in zip(pieces.forward_inputs, pieces.forward.inputs, strict=False):
            if position in given:
                state[local] = given[position]
        self.run([p.pieces.forward for p in self.parts], state)
        self.saved = {v: state[v] for v in pieces.saved}
        self.early = {j.value: state[j.value] for j in pieces.early}
        return [self.early[v] if v in self.early else self.hoisted[v] for v in self.first.sent]

    def backward(self, number: int, received: Sequence[Row]) -> list[Row]:
        pieces, found = self.pieces, self.early
        known = self.saved | self.totals | self.hoisted
        given = dict(zip(self.stage.gradients_received, received, strict=True))
        tangents = [i for i, e in enumerate(self.program.inputs) if e.kind == "tangent"]
        for local, position in zip(pieces.backward.inputs[len(pieces.saved) :], tangents, strict=False):
            whole = self.inputs.get(self.program.inputs[position].value)
            known[local] = given[position] if position in given or whole is None else [
                whole.clone() for _ in self.parts]
        returned: list[Row]
        if number % 2:
            first = {v: known[v] for v in self.first.backward_inputs.inputs}
            self.run([p.backward_inputs for p in self.parts], first)
            returned = [first[v] for v in self.first.returned]
            state = {v: first[v] if v in self.first.between else known[v] for v in self.first.backward_weights.inputs}
            self.run([p.backward_weights for p in self.parts], state)
        else:
            state = {v: known[v] for v in self.first.backward.inputs}
            self.run([p.backward for p in self.parts], state)
            returned = [state[v] for v in self.first.returned]
        found |= {j.value: state[j.value] for j in pieces.late}
        for value, row in found.items():
            self.joined[value].append([t.clone() for t in row])
        hand_on(self.program, self.first.decisions, pieces, found, self.inputs)
        return returned

    def finish(self) -> dict[int, Row]:
        """Results by position among the whole program's outputs."""
        pieces = self.pieces
        joins = {j.value: j.join for j in (*pieces.early, *pieces.late)}
        ends = dict(zip(pieces.totals, self.totals_in, strict=True))
        state: dict[int, Row] = dict(self.hoisted)
        for value in self.first.epilogue.inputs:
            if value in ends:
                state[value] = self.totals[ends[value]]
            elif value in joins:
                state[value] = [join_microbatches([row[rank] for row in self.joined[value]], joins[value])
                                for rank in range(self.mesh.world_size)]
            elif value not in state:
                state |= self.entering(pieces.forward_inputs, pieces.forward.inputs, 0)
        self.run([p.epilogue for p in self.parts], state)
        return {self.stage.outputs[p]: state[v]
                for p, v in zip(self.first.results, self.first.epilogue.outputs, strict=True)}


@torch.no_grad()
def run_virtual_stages(
    program: Program, decisions: Decisions, inputs: Mapping[int, torch.Tensor]
) -> VirtualResult:
    """:func:`fxpar.runtime.virtual.run_virtual` of a plan with stages.

    Raises:
        PlanFileError: the decisions do not fit the program.
    """
    mesh = stage_mesh(decisions)
    stages = [_VirtualStage(parts, inputs, mesh) for parts in pieces_of_stages(program, decisions)]
    for number in range(program.microbatches):
        carried: list[Row] = []
        for stage in stages:
            carried = stage.forward(number, carried)
        for stage in reversed(stages):
            carried = stage.backward(number, carried)
    rows: dict[int, Row] = {}
    for stage in reversed(stages):
        for position, row in stage.finish().items():
            have = rows.get(position)
            rows[position] = row if have is None else [a + b for a, b in zip(have, row, strict=True)]
    pieces = tuple(tuple(rows[i]) for i in range(len(program.outputs)))
    laid = tuple(enumerate(zip(pieces, decisions.outputs, strict=True)))
    return VirtualResult(
        tuple(joined_parts(p, program, i, layout, mesh) for i, (p, layout) in laid),
        tuple(replica_disagreement(p, layout, mesh) for _, (p, layout) in laid),
        pieces, tuple(p.pieces.forward for stage in stages for p in stage.parts),
    )
