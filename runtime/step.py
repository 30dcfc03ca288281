"""One training step of a rank: the generated forward and backward, fed from parameters, buffers and the batch.

``Forward`` values hold what backward needs; autograd sees one function of all parameters (:class:`PlanFunction`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from fxpar.plans.errors import FxparError
from fxpar.plans.layout import Layout, replicated
from fxpar.plans.program import Program
from fxpar.runtime.execute import Executable
from fxpar.runtime.groups import MeshGroups
from fxpar.runtime.interpret import constant_tensor
from fxpar.runtime.local import torch_dtype
from fxpar.runtime.parameters import as_dtensor
from fxpar.runtime.pieces import scatter
from fxpar.runtime.surface import torch_placements


@dataclass(frozen=True)
class Gradient:
    """Where a gradient goes: parameter value id, and how its local tensor becomes a DTensor."""

    value: int
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]


@contextmanager
def peers_may_stop() -> Iterator[None]:
    """Say in plain words that a collective failed because another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in ("Connection closed", "Connection reset", "imed out")):
            raise FxparError(
                "another rank has stopped", numbers=str(error).splitlines()[0], way_out="see that rank's own message"
            ) from error
        raise


class Forward:
    """One run of forward: its results, and (until backward takes them) the saved tensors.

    ``watched``: parameters that are saved as they are. A DTensor counts its in-place changes, its local tensor does
    not.
    """

    def __init__(
        self, results: dict[int, torch.Tensor], saved: list[torch.Tensor], watched: Sequence[torch.Tensor]
    ) -> None:
        self.results = results
        self.saved: list[torch.Tensor] | None = saved
        self.watched = watched
        self.versions = self.present_versions()

    def present_versions(self) -> list[int]:
        return [tensor._version for tensor in (*self.watched, *(self.saved or ()))]

    def take(self) -> list[torch.Tensor]:
        """The saved tensors, once.

        Raises:
            FxparError: they were taken before, or changed in place since forward (an optimizer step in between).
        """
        if self.saved is None:
            raise FxparError(
                "backward runs a second time for one forward",
                way_out="call the model again; a plan keeps nothing twice",
            )
        if self.versions != self.present_versions():
            raise FxparError(
                "a parameter or an input was changed in place between forward and backward",
                way_out="call optimizer.step() after backward",
            )
        saved, self.saved = self.saved, None
        return saved


class StepRunner:
    """What runners of a step share: a rank's part of tensors, and outputs as the user gets them."""

    gradients: tuple[Gradient | None, ...]

    def __init__(
        self,
        program: Program,
        layouts: tuple[Layout, ...],
        groups: MeshGroups,
        parameters: Mapping[int, nn.Parameter],
    ) -> None:
        self.program, self.layouts, self.groups, self.parameters = program, layouts, groups, parameters
        self.trained = tuple(v for v, p in parameters.items() if p.requires_grad)

    def gradient(self, value: int) -> Gradient:
        """Where the gradient of a parameter goes."""
        parameter = self.parameters[value]
        assert isinstance(parameter.data, DTensor)
        return Gradient(value, tuple(parameter.data.placements), tuple(parameter.shape))

    def piece(self, tensor: torch.Tensor, position: int) -> torch.Tensor:
        """This rank's part of the global tensor of input ``position``."""
        value = self.program.inputs[position].value
        local = scatter(tensor, self.program.dims[value], self.layouts[position], self.groups.mesh, self.groups.coords)
        return local.to(self.groups.device, non_blocking=True).contiguous()

    def forward(self, tensors: Mapping[int, torch.Tensor], seed: int, *, gradients: bool = True) -> Forward:
        """Run forward on global tensors by value id."""
        raise TypeError(f"{type(self).__name__} runs nothing")

    def backward(self, run: Forward, tangent: torch.Tensor) -> dict[int, DTensor]:
        """Per trained parameter (by value id) its gradient, once for ``run``."""
        raise TypeError(f"{type(self).__name__} runs nothing")

    def output(self, run: Forward, index: int, layout: Layout) -> torch.Tensor:
        """Output ``index`` as the user gets it: the global tensor, or a DTensor when the plan leaves it sharded."""
        local = run.results[index]
        if layout == replicated(self.groups.mesh):
            return local
        value = self.program.outputs[index].value
        placements = torch_placements(layout, self.program.dims[value], self.groups.mesh)
        if placements is None:
            raise FxparError(f"the output {self.program.outputs[index].name} has a layout that torch cannot say")
        return as_dtensor(local, placements, self.program.types[value].shape, self.groups)

    def handed_out(
        self, gradients: Sequence[Gradient | None], run: Forward, tangent: torch.Tensor
    ) -> dict[int, DTensor]:
        """The gradients that ``run`` holds already, once, times ``tangent`` (a scalar)."""
        scale = float(tangent)
        found: dict[int, DTensor] = {}
        used: dict[int, list[tuple[int, int]]] = {}
        wanted = [gradient for gradient in gradients if gradient is not None]
        for gradient, local in zip(wanted, run.take(), strict=True):
            local = own_memory(local, used)
            if scale != 1.0:
                local.mul_(scale)
            found[gradient.value] = as_dtensor(local, gradient.placements, gradient.shape, self.groups)
        return found


class Runner(StepRunner):
    """Runs an executable on this rank's tensors."""

    def __init__(
        self,
        program: Program,
        layouts: tuple[Layout, ...],
        executable: Executable,
        groups: MeshGroups,
        parameters: Mapping[int, nn.Parameter],
    ) -> None:
        super().__init__(program, layouts, groups, parameters)
        self.executable = executable
        by_name = {e.name: e.value for e in program.inputs if e.kind == "parameter"}
        self.gradients = tuple(
            self.gradient(by_name[program.outputs[i].name]) if program.outputs[i].kind == "gradient" else None
            for i in executable.halves.late_outputs
        )
        local_of = dict(zip(executable.halves.forward_inputs, executable.halves.forward.inputs, strict=True))
        self.watched = tuple(
            parameters[e.value]
            for i, e in enumerate(program.inputs)
            if e.kind == "parameter" and local_of[i] in executable.halves.saved
        )
        self.written = {o.name for o in program.outputs if o.kind == "buffer"}
        self.constants = {
            e.value: self.piece(constant_tensor(program.constants[int(e.name)], groups.device), i)
            for i, e in enumerate(program.inputs)
            if e.kind == "constant"
        }

    @torch.no_grad()
    def forward(self, tensors: Mapping[int, torch.Tensor], seed: int, *, gradients: bool = True) -> Forward:
        """Run forward.

        Args:
            tensors: global tensors of the inputs and buffers, by value id.
            seed: the step's seed for random ops.
            gradients: whether backward may follow; forward is the same.
        """
        halves = self.executable.halves
        row: list[torch.Tensor] = []
        for position in halves.forward_inputs:
            entry = self.program.inputs[position]
            match entry.kind:
                case "parameter":
                    parameter: Any = self.parameters[entry.value]
                    row.append(parameter.to_local())
                case "constant":
                    row.append(self.constants[entry.value])
                case "seed":
                    row.append(torch.tensor(seed, dtype=torch.int64, device=self.groups.device))
                case _:
                    piece = self.piece(tensors[entry.value], position)
                    # the buffer itself is overwritten after forward; backward may still read its old value
                    row.append(piece.clone() if entry.name in self.written else piece)
        with peers_may_stop():
            returned = self.executable.forward(row)
        count = len(halves.kept_outputs)
        results = dict(zip(halves.kept_outputs, returned[:count], strict=True))
        return Forward(results, list(returned[count:]), self.watched)

    @torch.no_grad()
    def backward(self, run: Forward, tangent: torch.Tensor) -> dict[int, DTensor]:
        """Run backward once for ``run``.

        Args:
            tangent: d(total)/d(loss), a scalar.

        Returns:
            Per trained parameter (by value id) its gradient in the parameter's placements.
        """
        row = run.take()
        for entry in self.program.inputs:
            if entry.kind == "tangent":
                dtype = torch_dtype(self.program.types[entry.value].dtype)
                row.append(tangent.to(self.groups.device, dtype).reshape(self.program.types[entry.value].shape))
        with peers_may_stop():
            returned = self.executable.backward(row)
        found: dict[int, DTensor] = {}
        used: dict[int, list[tuple[int, int]]] = {}
        for gradient, local in zip(self.gradients, returned, strict=True):
            if gradient is not None:
                local = own_memory(local, used)
                found[gradient.value] = as_dtensor(local, gradient.placements, gradient.shape, self.groups)
        return found


def own_memory(tensor: torch.Tensor, used: dict[int, list[tuple[int, int]]]) -> torch.Tensor:
    """``tensor``, contiguous, or a copy where its elements are also another gradient's.

    Two parameters may have the very same gradient (two biases added to one sum), which a program computes once; what
    works on gradients in place (clipping, scaling, accumulating) must find each of them apart. Parts of one bucket
    share storage but no elements and are left as they are.

    Args:
        used: elements taken so far, per storage as (start, end); added to.
    """
    tensor = tensor.contiguous()
    taken = used.setdefault(tensor.untyped_storage().data_ptr(), [])
    start = int(tensor.storage_offset())
    end = start + int(tensor.numel())
    if any(start < other_end and other_start < end for other_start, other_end in taken):
        return tensor.clone()
    taken.append((start, end))
    return tensor


class PlanFunction(torch.autograd.Function):
    """All of a step as one function from the parameters to the loss."""

    @staticmethod
    def forward(
        ctx: Any, runner: StepRunner, run: Forward, loss: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.runner, ctx.run = runner, run
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[Any, ...]:
        runner: StepRunner = ctx.runner
        gradients = runner.backward(ctx.run, tangents[0])
        return (None, None, None, *(gradients.get(value) for value in runner.trained))
