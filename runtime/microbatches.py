"""One training step of a rank in microbatches: prologue, forward and backward of each, epilogue.

Backward of a microbatch runs right after its forward, with d(total)/d(loss) = 1, inside ``forward`` of the step: the
activations of one microbatch are held at a time. ``loss.backward()`` then only hands the gradients out, multiplied by
the tangent that comes in (backward is linear in it). Without gradients wanted, forward alone is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar.plans.errors import FxparError
from fxpar.plans.layout import Layout, replicated
from fxpar.plans.program import Program
from fxpar.runtime.execute import Boxed, graph_of
from fxpar.runtime.groups import MeshGroups
from fxpar.runtime.interpret import constant_tensor
from fxpar.runtime.local import torch_dtype
from fxpar.runtime.pieces import input_of_microbatch, join_microbatches
from fxpar.runtime.rewrite.microbatches import Pieces
from fxpar.runtime.step import Forward, Gradient, StepRunner, peers_may_stop


@dataclass(frozen=True)
class Repeated:
    """The pieces as code; ``parts`` says what goes in and out."""

    parts: Pieces
    prologue: Boxed
    forward: Boxed
    backward: Boxed
    epilogue: Boxed


def build_pieces(parts: Pieces, groups: MeshGroups) -> Repeated:
    """Code for the pieces of this rank."""
    return Repeated(parts, *(graph_of(local, groups) for local in parts.programs))


class MicrobatchRunner(StepRunner):
    """Runs the pieces on this rank's tensors."""

    def __init__(
        self,
        program: Program,
        layouts: tuple[Layout, ...],
        code: Repeated,
        groups: MeshGroups,
        parameters: Mapping[int, nn.Parameter],
    ) -> None:
        super().__init__(program, layouts, groups, parameters)
        self.code = code
        by_name = {e.name: e.value for e in program.inputs if e.kind == "parameter"}
        self.gradients: tuple[Gradient | None, ...] = tuple(
            self.gradient(by_name[output.name]) if output.kind == "gradient" else None for output in program.outputs
        )
        self.constants = {
            e.value: constant_tensor(program.constants[int(e.name)], groups.device)
            for e in program.inputs if e.kind == "constant"
        }
        # buffers that a microbatch leaves to the next: value of the input, and of the result
        buffers = {e.name: e.value for e in program.inputs if e.kind == "buffer"}
        self.chains = {
            buffers[output.name]: code.parts.epilogue.outputs[i]
            for i, output in enumerate(program.outputs) if code.parts.time.outputs[i] == "chain"
        }

    def row(self, positions: tuple[int, ...], tensors: Mapping[int, torch.Tensor], number: int) -> list[torch.Tensor]:
        """This rank's part of the program inputs at ``positions`` for one microbatch."""
        found: list[torch.Tensor] = []
        for position in positions:
            entry = self.program.inputs[position]
            if entry.kind == "parameter":
                parameter: Any = self.parameters[entry.value]
                found.append(parameter.to_local())
            else:
                found.append(self.piece(input_of_microbatch(self.program, position, tensors, number), position))
        return found

    @torch.no_grad()
    def forward(self, tensors: Mapping[int, torch.Tensor], seed: int, *, gradients: bool = True) -> Forward:
        """Run all microbatches.

        Args:
            tensors: global tensors of the inputs (the whole batch) and buffers, by value id.
            seed: the step's seed for random ops.
            gradients: run backward, too.
        """
        parts, device = self.code.parts, self.groups.device
        given = dict(tensors) | self.constants
        given |= {e.value: torch.tensor(seed, dtype=torch.int64) for e in self.program.inputs if e.kind == "seed"}
        with peers_may_stop():
            hoisted = list(self.code.prologue(self.row(parts.prologue_inputs, given, 0)))
            totals = [
                torch.zeros(kind.shape, dtype=torch_dtype(kind.dtype), device=device)
                for kind in (parts.backward.types[v] for v in parts.totals)
            ] if gradients else []
            found: dict[int, list[torch.Tensor]] = {j.value: [] for j in (*parts.early, *parts.late)}
            for number in range(parts.time.count):
                returned = self.code.forward([*self.row(parts.forward_inputs, given, number), *hoisted])
                early, saved = returned[: len(parts.early)], list(returned[len(parts.early) :])
                del returned
                for joined, tensor in zip(parts.early, early, strict=True):
                    found[joined.value].append(tensor)
                given.update((value, found[made][-1]) for value, made in self.chains.items())
                if not gradients:
                    continue
                late = self.code.backward(_emptied(saved, [*self.tangents(), *totals]))
                for joined, tensor in zip(parts.late, late, strict=False):
                    found[joined.value].append(tensor)
                del late
            results = {
                j.value: join_microbatches(found.pop(j.value), j.join)
                for j in (*parts.early, *parts.late) if found[j.value]
            }
            if not gradients:
                return Forward({
                    i: results[v] for i, v in enumerate(parts.epilogue.outputs) if v in results
                }, [], ())
            row = [*totals, *(results[j.value] for j in (*parts.early, *parts.late)), *hoisted]
            totals.clear()
            results.clear()
            hoisted.clear()
            outputs = self.code.epilogue(row)
        late_ones = [i for i, gradient in enumerate(self.gradients) if gradient is not None]
        return Forward(
            {i: tensor for i, tensor in enumerate(outputs) if self.gradients[i] is None},
            [outputs[i] for i in late_ones], (),
        )

    def tangents(self) -> list[torch.Tensor]:
        """d(total)/d(loss) = 1, where the program has a backward."""
        return [
            torch.ones(kind.shape, dtype=torch_dtype(kind.dtype), device=self.groups.device)
            for kind in (self.program.types[e.value] for e in self.program.inputs if e.kind == "tangent")
        ]

    @torch.no_grad()
    def backward(self, run: Forward, tangent: torch.Tensor) -> dict[int, DTensor]:
        """The gradients of ``run``, once, times ``tangent`` (a scalar)."""
        return self.handed_out(self.gradients, run, tangent)

    def output(self, run: Forward, index: int, layout: Layout) -> torch.Tensor:
        """As :meth:`StepRunner.output`; of microbatches joined along a dim the plan must leave whole rows."""
        if isinstance(self.code.parts.time.outputs[index], int) and layout != replicated(self.groups.mesh):
            raise FxparError(f"the output {self.program.outputs[index].name} is left cut, and joined of microbatches")
        return super().output(run, index, layout)


def _emptied(saved: list[torch.Tensor], rest: list[torch.Tensor]) -> list[torch.Tensor]:
    """Both as one list; ``saved`` holds on to nothing."""
    row = [*saved, *rest]
    saved.clear()
    return row
