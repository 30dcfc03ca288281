"""Bytes that every virtual rank holds, counted from the tensors themselves.

Ranks run in lockstep, each collective as real ranks run it: packed and under way where it stands, results cut out of
what arrived when the first of them is read or waited for (``fxpar.runtime.collectives``, ``fxpar.runtime.execute``).
"""

from __future__ import annotations

from functools import reduce

import torch

from fxpar.live_bytes import LiveBytes
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program
from fxpar.runtime import packing
from fxpar.runtime.local import CollectiveStep, last_uses, torch_dtype
from fxpar.runtime.pieces import input_of_microbatch, join_microbatches, scatter
from fxpar.runtime.step import own_memory
from fxpar.runtime.virtual import _REDUCE, _run_step, pieces_of_all, rewrite_all

Row = list[torch.Tensor]


@torch.no_grad()
def virtual_peaks(program: Program, decisions: Decisions, values: dict[int, torch.Tensor]) -> list[int]:
    """Per rank the most bytes of distinct storages held at once in a step, program inputs included.

    Args:
        values: the global tensor of every program input, by value id.
    """
    if program.time is not None:
        return _Repeated(program, decisions, values).run()
    return _Lockstep(program, decisions, values).run()


class _Lockstep:
    def __init__(self, program: Program, decisions: Decisions, values: dict[int, torch.Tensor]) -> None:
        mesh = self.mesh = decisions.mesh
        self.programs = rewrite_all(program, decisions)
        self.ranks = range(mesh.world_size)
        self.state: dict[int, Row] = {
            local: [scatter(values[item.value], program.dims[item.value], layout, mesh, mesh.coordinates(r)).clone()
                    for r in self.ranks]
            for item, layout, local in zip(program.inputs, decisions.inputs, self.programs[0].inputs, strict=True)
        }
        self.inputs = list(self.state.values())
        self.gradients = [v for o, v in zip(program.outputs, self.programs[0].outputs, strict=True)
                          if o.kind == "gradient"]
        # result -> index of the step that is under way, and by that index what ranks packed, received and were given
        self.pending: dict[int, int] = {}
        self.sent: dict[int, list[Row]] = {}
        self.arrived: dict[int, Row] = {}
        self.given: dict[int, list[Row]] = {}
        # results of collectives that nothing reads
        self.unread: set[int] = set()
        self.peaks = [0] * mesh.world_size

    def run(self) -> list[int]:
        self.run_steps()
        self.hand_over(self.gradients)
        return self.peaks

    def hand_over(self, gradients: list[int]) -> None:
        row: dict[int, dict[int, list[tuple[int, int]]]] = {r: {} for r in self.ranks}
        self.state |= {-1 - v: [own_memory(self.state[v][r], row[r]) for r in self.ranks] for v in gradients}
        self.look()

    def run_steps(self) -> None:
        first, late = self.programs[0], False
        self.look()
        for index, freed in enumerate(last_uses(first)):
            step = first.steps[index]
            if step.phase == "backward" and not late:
                late = True
                self.finish_all()
            for value in step.reads:
                if value in self.pending:
                    self.finish(self.pending[value])
            if isinstance(step, CollectiveStep):
                self.start(index)
            else:
                _run_step(index, self.programs, self.state, self.mesh)
                self.look()
            for value in freed:
                if self.state.pop(value, None) is None:
                    self.unread.add(value)
        self.finish_all()

    def look(self, beside: list[int] | None = None) -> None:
        """Count what ranks hold now, with so many bytes ``beside``."""
        for rank in self.ranks:
            rows = [*self.inputs, *self.state.values(), *self.arrived.values()]
            held = [row[rank] for row in rows]
            held += [t for given in (*self.given.values(), *self.sent.values()) for t in given[rank]]
            live = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
            self.peaks[rank] = max(self.peaks[rank], sum(live.values()) + (beside[rank] if beside else 0))

    def step_of(self, index: int, rank: int) -> CollectiveStep:
        step = self.programs[rank].steps[index]
        assert isinstance(step, CollectiveStep)
        return step

    def start(self, index: int) -> None:
        step = self.step_of(index, 0)
        tensors = [[self.state[v][rank] for v in step.values] for rank in self.ranks]
        sent, transient = [], []
        for rank in self.ranks:
            with LiveBytes(counted=[], known=tensors[rank]) as live:
                sent.append(pack(self.step_of(index, rank), tensors[rank], self.me(index, rank)))
            transient.append(live.peak)
        self.look(transient)
        arrived: dict[int, torch.Tensor] = {}
        for group in self.mesh.groups((step.axis,)):
            rows = move([self.step_of(index, rank) for rank in group], [sent[rank] for rank in group])
            arrived.update(zip(group, rows, strict=True))
        self.arrived[index] = [arrived[rank] for rank in self.ranks]
        # several tensors are summed in the row that was packed, one in a copy of what was packed
        self.sent[index] = [[] if step.kind == "all_reduce" and len(step.values) > 1 else [t] for t in sent]
        self.given[index] = tensors if step.kind.startswith("halo") else [[] for _ in self.ranks]
        self.look()
        if step.kind == "all_reduce":
            self.sent[index] = [[] for _ in self.ranks]
        self.pending.update(dict.fromkeys(step.outputs, index))

    def me(self, index: int, rank: int) -> int:
        return self.programs[rank].coords[self.step_of(index, rank).axis]

    def finish(self, index: int) -> None:
        step = self.step_of(index, 0)
        self.sent.pop(index)
        rows = []
        for rank in self.ranks:
            shapes = [self.programs[rank].types[v].shape for v in step.outputs]
            rows.append(unpack(self.step_of(index, rank), self.arrived[index][rank], self.me(index, rank),
                               self.given[index][rank], shapes))
        for position, value in enumerate(step.outputs):
            del self.pending[value]
            self.state[value] = [row[position] for row in rows]
        self.look()
        for value in self.unread.intersection(step.outputs):
            del self.state[value]
        del self.arrived[index], self.given[index]

    def finish_all(self) -> None:
        for index in list(dict.fromkeys(self.pending.values())):
            self.finish(index)


class _Repeated(_Lockstep):
    """A step in microbatches, as ``fxpar.runtime.microbatches`` runs it."""

    def __init__(self, program: Program, decisions: Decisions, values: dict[int, torch.Tensor]) -> None:
        self.program, self.decisions, self.values = program, decisions, values
        self.mesh, self.parts = decisions.mesh, pieces_of_all(program, decisions)
        self.ranks = range(self.mesh.world_size)
        self.pending, self.sent, self.arrived, self.given, self.unread = {}, {}, {}, {}, set()
        self.peaks = [0] * self.mesh.world_size
        first = self.parts[0]
        local = dict(zip(first.forward_inputs, first.forward.inputs, strict=False))
        self.lasting = {
            local[i]: self.row(i, 0) for i, item in enumerate(program.inputs) if item.kind in ("parameter", "buffer")
        }

    def row(self, position: int, number: int) -> Row:
        item = self.program.inputs[position]
        whole = input_of_microbatch(self.program, position, self.values, number)
        return [scatter(whole, self.program.dims[item.value], self.decisions.inputs[position], self.mesh,
                        self.mesh.coordinates(r)).clone() for r in self.ranks]

    def entering(self, inputs: tuple[int, ...], positions: tuple[int, ...], number: int) -> dict[int, Row]:
        pairs = zip(inputs, positions, strict=False)
        return {v: self.lasting[v] if v in self.lasting else self.row(i, number) for v, i in pairs}

    def piece(self, which: int, state: dict[int, Row], beside: list[Row]) -> None:
        self.programs = tuple(p.programs[which] for p in self.parts)
        self.state, self.inputs = state, [*self.lasting.values(), *beside]
        self.run_steps()

    def run(self) -> list[int]:
        first = self.parts[0]
        self.piece(0, self.entering(first.prologue.inputs, first.prologue_inputs, 0), [])
        hoisted = {v: self.state[v] for v in first.hoisted}
        totals = {
            v: [torch.zeros(p.backward.types[v].shape, dtype=torch_dtype(p.backward.types[v].dtype))
                for p in self.parts]
            for v in first.backward.inputs[len(first.backward.inputs) - len(first.totals) :]
        }
        found: dict[int, list[Row]] = {j.value: [] for j in (*first.early, *first.late)}
        tangents = [i for i, item in enumerate(self.program.inputs) if item.kind == "tangent"]
        for number in range(self.program.microbatches):
            beside = [*hoisted.values(), *totals.values(), *(row for rows in found.values() for row in rows)]
            self.piece(1, self.entering(first.forward.inputs, first.forward_inputs, number) | hoisted, beside)
            late = {v: self.state[v] for v in first.saved}
            for j in first.early:
                found[j.value].append(self.state[j.value])
            late |= zip(first.backward.inputs[len(first.saved) :], (self.row(i, 0) for i in tangents), strict=False)
            self.state = {}
            self.piece(2, late | totals, beside)
            for j in first.late:
                found[j.value].append(self.state[j.value])
        results = {
            j.value: [join_microbatches([row[r] for row in found[j.value]], j.join) for r in self.ranks]
            for j in (*first.early, *first.late)
        }
        ends = dict(zip(first.totals, totals.values(), strict=True))
        totals.clear()
        state = hoisted | results | ends
        del ends, hoisted
        self.piece(3, state, [])
        gradients = zip(self.program.outputs, first.epilogue.outputs, strict=True)
        self.hand_over([v for o, v in gradients if o.kind == "gradient"])
        return self.peaks


def pack(step: CollectiveStep, tensors: Row, me: int) -> torch.Tensor:
    """What a rank sends."""
    geometries: list = list(step.geometries)
    match step.kind:
        case "all_reduce":
            return packing.pack_row(tensors)
        case "all_gather":
            return packing.pack_gathers(tensors, geometries, me)
        case "reduce_scatter":
            return packing.pack_scatters(tensors, geometries)
        case "all_to_all":
            return packing.pack_exchange(tensors[0], geometries[0], me)
        case _:
            return packing.pack_halo(tensors[0], geometries[0], me, step.kind == "halo_sum")


def move(steps: list[CollectiveStep], sent: Row) -> Row:
    """What every member of a group receives, each in a storage of its own."""
    kind, members = steps[0].kind, range(len(steps))
    if kind == "all_gather":
        return [torch.cat([t.reshape(-1) for t in sent]) for _ in members]
    if kind in ("all_reduce", "reduce_scatter"):
        total = reduce(_REDUCE[steps[0].reduce], [t.reshape(-1) for t in sent])
        return [total.clone() for _ in members] if kind == "all_reduce" else [
            part.clone() for part in total.chunk(len(steps))]
    geometries: list = [s.geometries[0] for s in steps]
    sizes = [
        packing.exchange_sizes(g, i)[0] if kind == "all_to_all" else packing.halo_sizes(g, i, kind == "halo_sum")[0]
        for i, g in enumerate(geometries)
    ]
    parts = [t.split(n) for t, n in zip(sent, sizes, strict=True)]
    return [torch.cat([parts[peer][i] for peer in members]) for i in members]


def unpack(step: CollectiveStep, arrived: torch.Tensor, me: int, given: Row, shapes: list[tuple[int, ...]]) -> Row:
    """A rank's results."""
    geometries: list = list(step.geometries)
    match step.kind:
        case "all_reduce":
            return packing.unpack_row(arrived, shapes)
        case "all_gather":
            return packing.unpack_gathers(arrived, geometries, shapes)
        case "reduce_scatter":
            return packing.unpack_scatters(arrived, geometries, me, shapes)
        case "all_to_all":
            return [packing.unpack_exchange(arrived, geometries[0], me, shapes[0])]
        case _:
            return [packing.unpack_halo(arrived, given[0], geometries[0], me, step.kind == "halo_sum", shapes[0])]
