"""One stage on one rank: what the actions of a schedule do to its tensors.

Forward and backward of a microbatch run generated code; what forward keeps for the backward of its microbatch are its
own tensors only: parameters, inputs and what the prologue made are taken again when backward runs, so a gathered copy
of a parameter lives from ``UNSHARD`` to ``RESHARD``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fxpar.runtime.execute import Boxed, graph_of
from fxpar.runtime.groups import MeshGroups
from fxpar.runtime.interpret import constant_tensor
from fxpar.runtime.local import LocalProgram, torch_dtype
from fxpar.runtime.pieces import input_of_microbatch, join_microbatches, scatter
from fxpar.runtime.rewrite.stage_pieces import StagePieces

Tensors = tuple[torch.Tensor, ...]


class StageBody:
    """Runs one stage; the same object for every step.

    Args:
        parts: what this rank runs of the stage.
        parameters: the rank's parameter of every parameter input of the WHOLE program, by position.
    """

    def __init__(self, parts: StagePieces, parameters: Mapping[int, nn.Parameter], groups: MeshGroups) -> None:
        self.parts, self.parameters, self.groups = parts, parameters, groups
        self.stage, self.program, self.pieces = parts.stage, parts.stage.program, parts.pieces
        self.entering = {
            value: position for position, value in zip(self.pieces.forward_inputs, self.pieces.forward.inputs,
                                                       strict=False)
        }
        self.constants = {
            i: constant_tensor(self.program.constants[int(e.name)], groups.device)
            for i, e in enumerate(self.program.inputs) if e.kind == "constant"
        }
        tangents = [i for i, e in enumerate(self.program.inputs) if e.kind == "tangent"]
        first = len(self.pieces.saved)
        self.tangents = dict(zip(self.pieces.backward.inputs[first:], tangents, strict=False))
        self.totals_in = self.pieces.backward.inputs[len(self.pieces.backward.inputs) - len(self.pieces.totals) :]
        self.own = tuple(  # saved values that are a microbatch's alone
            v for v in self.pieces.saved
            if v not in self.pieces.hoisted and not (v in self.entering and self._whole(self.entering[v]))
        )
        self.chains = {  # buffers that microbatches hand on
            o.name: p for p, o in enumerate(self.program.outputs)
            if o.kind == "buffer" and self.pieces.time.outputs[p] == "chain"
        }
        self.begin({}, 0)

    def _whole(self, position: int) -> bool:
        """True of inputs that are at hand all the step."""
        entry = self.program.inputs[position]
        return entry.kind in ("parameter", "constant") or (
            entry.kind in ("input", "seed", "microbatch") and self.stage.inputs[position] >= 0
        )

    @cached_property
    def leaving(self) -> frozenset[int]:
        """Local values that the epilogue reads or returns."""
        return frozenset(self.parts.epilogue.inputs)

    @cached_property
    def prologue(self) -> Boxed:
        return graph_of(self.pieces.prologue, self.groups)

    @cached_property
    def forward_code(self) -> Boxed:
        return graph_of(self.pieces.forward, self.groups)

    @cached_property
    def backward_code(self) -> tuple[LocalProgram, Boxed]:
        return self.parts.backward, graph_of(self.parts.backward, self.groups)

    @cached_property
    def inputs_code(self) -> tuple[LocalProgram, Boxed]:
        return self.parts.backward_inputs, graph_of(self.parts.backward_inputs, self.groups)

    @cached_property
    def weights_code(self) -> tuple[LocalProgram, Boxed]:
        return self.parts.backward_weights, graph_of(self.parts.backward_weights, self.groups)

    @cached_property
    def epilogue(self) -> Boxed:
        return graph_of(self.parts.epilogue, self.groups)

    def begin(self, tensors: Mapping[int, torch.Tensor], seed: int) -> None:
        """Begin a step.

        Args:
            tensors: global tensors of inputs and buffers, by value id of the stage's program.
        """
        self.tensors = dict(tensors)
        for entry in self.program.inputs:
            if entry.kind == "seed":
                self.tensors[entry.value] = torch.tensor(seed, dtype=torch.int64, device=self.groups.device)
        self.hoisted: dict[int, torch.Tensor] | None = None
        self.saved: dict[int, dict[int, torch.Tensor]] = {}
        self.halfway: dict[int, dict[int, torch.Tensor]] = {}
        self.joined: dict[int, dict[int, torch.Tensor]] = {j.value: {} for j in (*self.pieces.early, *self.pieces.late)}
        self.totals: dict[int, torch.Tensor] = {}

    def unshard(self) -> None:
        """Make what all microbatches share: counts, masks, copies of parameters that are held."""
        if self.hoisted is None:
            row = [self.input(p, 0) for p in self.pieces.prologue_inputs]
            self.hoisted = dict(zip(self.pieces.hoisted, self.prologue(row), strict=True))

    def reshard(self) -> None:
        """Let go of it."""
        self.hoisted = None

    def input(self, position: int, microbatch: int) -> torch.Tensor:
        """This rank's part of an input that comes from no other stage."""
        entry = self.program.inputs[position]
        if entry.kind == "parameter":
            parameter: Any = self.parameters[self.stage.inputs[position]]
            return parameter.to_local()
        if entry.kind == "constant":
            return self.constants[position]
        if entry.kind == "seed" and not self.program.types[entry.value].shape:
            return self.tensors[entry.value]  # of a program that does not repeat, as of any other
        whole = input_of_microbatch(self.program, position, self.tensors, microbatch)
        layout, dims = self.parts.decisions.inputs[position], self.program.dims[entry.value]
        local = scatter(whole, dims, layout, self.groups.mesh, self.groups.coords)
        local = local.to(self.groups.device, non_blocking=True).contiguous()
        # the buffer itself is overwritten after the step; backward may still read its old value
        return local.clone() if entry.kind == "buffer" else local

    def shared(self, value: int) -> torch.Tensor:
        """What the prologue made."""
        self.unshard()
        assert self.hoisted is not None
        return self.hoisted[value]

    def forward(self, microbatch: int, received: Tensors) -> Tensors:
        """Run forward; ``received`` are the stage's received values. Returns what the next stage receives."""
        given = dict(zip(self.stage.received, received, strict=True))
        del received

        def value(v: int) -> torch.Tensor:
            if v not in self.entering:
                return self.shared(v)
            position = self.entering[v]
            return given.pop(position) if position in given else self.input(position, microbatch)

        results = self.forward_code([value(v) for v in self.pieces.forward.inputs])
        early = {j.value: t for j, t in zip(self.pieces.early, results, strict=False)}
        kept = dict(zip(self.pieces.saved, results[len(self.pieces.early) :], strict=True))
        self.saved[microbatch] = {v: kept[v] for v in self.own}
        self.keep(microbatch, early)
        self.hand_on(early)
        return tuple(early[v] if v in early else self.shared(v) for v in self.parts.sent)

    def hand_on(self, results: Mapping[int, torch.Tensor]) -> None:
        """Give buffers that this microbatch wrote to the next one."""
        for name, position in self.chains.items():
            value = self.pieces.epilogue.outputs[position]
            if value in results:
                for entry in self.program.inputs:
                    if entry.kind == "buffer" and entry.name == name:
                        self.tensors[entry.value] = results[value]

    def keep(self, microbatch: int, results: Mapping[int, torch.Tensor]) -> None:
        """Keep results that leave the step; what is only handed to another stage is not kept."""
        for value, tensor in results.items():
            if value in self.leaving:
                self.joined[value][microbatch] = tensor

    def backward(self, microbatch: int, received: Tensors, tangent: Callable[[], torch.Tensor]) -> Tensors:
        """Run the whole backward; ``received`` are gradients from the next stage."""
        program, code = self.backward_code
        known = self.known(microbatch, received, tangent)
        del received
        results = code(self.row(program, known, microbatch, frozenset()))
        self.collect(microbatch, results[len(self.parts.returned) :])
        return results[: len(self.parts.returned)]

    def backward_inputs(self, microbatch: int, received: Tensors, tangent: Callable[[], torch.Tensor]) -> Tensors:
        """Run the part of backward that makes gradients for the stage before."""
        program, code = self.inputs_code
        known = self.known(microbatch, received, tangent)
        del received
        results = code(self.row(program, known, microbatch, frozenset(self.weights_code[0].inputs)))
        known.update(zip(self.parts.between, results[len(self.parts.returned) :], strict=True))
        self.halfway[microbatch] = known
        return results[: len(self.parts.returned)]

    def backward_weights(self, microbatch: int) -> None:
        """Run the rest."""
        program, code = self.weights_code
        known = self.halfway.pop(microbatch)
        self.collect(microbatch, code(self.row(program, known, microbatch, frozenset())))

    def row(
        self, program: LocalProgram, known: dict[int, torch.Tensor], microbatch: int, later: frozenset[int]
    ) -> list[torch.Tensor]:
        """What a part of a microbatch's backward takes; of what is ``known``, only what is read ``later`` is left, so
        that the rest goes as soon as it has been used."""
        row = [self.value(v, known, microbatch) for v in program.inputs]
        for value in known.keys() - later:
            del known[value]
        return row

    def known(
        self, microbatch: int, received: Tensors, tangent: Callable[[], torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Local values that a microbatch's backward begins with and that are its own."""
        known = self.saved.pop(microbatch)
        given = dict(zip(self.stage.gradients_received, received, strict=True))
        for value, position in self.tangents.items():
            if position in given:
                known[value] = given[position]
            else:
                kind = self.program.types[self.program.inputs[position].value]
                known[value] = tangent().to(self.groups.device, torch_dtype(kind.dtype)).reshape(kind.shape)
        return known

    def value(self, value: int, known: Mapping[int, torch.Tensor], microbatch: int) -> torch.Tensor:
        """A local value for a microbatch's backward."""
        if value in known:
            return known[value]
        if value in self.totals_in:
            if value not in self.totals:
                kind = self.pieces.backward.types[value]
                self.totals[value] = torch.zeros(kind.shape, dtype=torch_dtype(kind.dtype), device=self.groups.device)
            return self.totals[value]
        return self.input(self.entering[value], microbatch) if value in self.entering else self.shared(value)

    def collect(self, microbatch: int, results: Tensors) -> None:
        """Keep what a microbatch's backward left; totals were added to in place."""
        self.keep(microbatch, {j.value: t for j, t in zip(self.pieces.late, results, strict=False)})

    def finish(self, *, gradients: bool = True) -> dict[int, torch.Tensor]:
        """The step's results of this stage, by position among the whole program's outputs; without ``gradients``, what
        forward alone has left."""
        if not gradients:
            return {self.stage.outputs[p]: self.early_result(self.pieces.epilogue.outputs[p])
                    for p in self.parts.results if self.program.outputs[p].kind != "gradient"}
        ends = dict(zip(self.pieces.totals, self.totals_in, strict=True))
        row = [self.value(ends[v], {}, 0) if v in ends else self.early_result(v) for v in self.parts.epilogue.inputs]
        self.totals.clear()
        self.joined = {value: {} for value in self.joined}
        results = self.epilogue(row)
        return {self.stage.outputs[p]: t for p, t in zip(self.parts.results, results, strict=True)}

    def early_result(self, value: int) -> torch.Tensor:
        """A result of all microbatches, joined."""
        found = self.joined.get(value)
        if found is not None:
            join = next(j.join for j in (*self.pieces.early, *self.pieces.late) if j.value == value)
            return join_microbatches([found[m] for m in sorted(found)], join)
        return self.shared(value) if value in self.pieces.hoisted else self.input(self.entering[value], 0)
