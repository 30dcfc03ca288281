"""Stages driven by ``torch.distributed.pipelining``: torch walks through the plan's actions, what they do is ours.

A :class:`PipelineRunner` stands where a :class:`fxpar.runtime.step.Runner` stands for plans without stages: one call
runs all actions, forward and backward; a backward pass afterwards only hands out the gradients that are there already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fxpar.plans.errors import FxparError
from fxpar.plans.layout import Layout, local_shape, replicated
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, TensorType
from fxpar.plans.schedule import Schedule
from fxpar.plans.stages import Stages
from fxpar.runtime.stage_body import StageBody, Tensors
from fxpar.runtime.stage_exchange import Exchange, Incoming
from fxpar.runtime.stage_groups import StageGroups
from fxpar.runtime.step import Forward, Gradient, StepRunner, peers_may_stop
from fxpar.runtime.torch_pipelining import PipelineStageBase, prepared_schedule, run_actions

ANCHOR = -1
"""Stands among a rank's trained parameters, so that autograd reaches ranks that train none."""


class PipelineStage(PipelineStageBase):
    """A stage as torch's schedules know it. ``places[s]``: the rank of stage ``s`` along the pipeline."""

    def __init__(
        self, index: int, body: StageBody, exchange: Exchange, groups: StageGroups, places: tuple[int, ...]
    ) -> None:
        super().__init__(nn.Identity(), index, len(places), groups.inside.device, groups.pipeline)
        self.index, self.body, self.exchange, self.places = index, body, exchange, places
        self.tangent = torch.ones((), dtype=torch.float64)
        self.forget()

    def forget(self) -> None:
        """Begin a step."""
        self.coming: dict[tuple[str, int], Incoming | Tensors] = {}
        self.going: dict[tuple[str, int], Tensors] = {}
        self.results: dict[int, torch.Tensor] = {}

    def types(self, positions: tuple[int, ...]) -> list[TensorType]:
        """Local types of the stage's inputs at ``positions``."""
        program, decisions = self.body.program, self.body.parts.decisions
        values = [(program.inputs[i].value, decisions.inputs[i]) for i in positions]
        groups = self.body.groups
        return [
            TensorType(local_shape(program.dims[v], layout, groups.mesh, groups.coords), program.types[v].dtype)
            for v, layout in values
        ]

    def take(self, kind: str, microbatch: int) -> Tensors:
        """What came for a microbatch."""
        found = self.coming.pop((kind, microbatch), ())
        return found.take() if isinstance(found, Incoming) else found

    # sends and receives: issued here, so torch has none to make

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        types = self.types(self.body.stage.received)
        self.coming["F", fwd_chunk_id] = self.exchange.receive(types, self.places[self.index - 1])
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward:
            types = self.types(self.body.stage.gradients_received)
            self.coming["B", bwd_chunk_id] = self.exchange.receive(types, self.places[self.index + 1])
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        self.exchange.send(self.going.pop(("F", fwd_chunk_id)), self.places[self.index + 1])
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward:
            self.exchange.send(self.going.pop(("B", bwd_chunk_id)), self.places[self.index - 1])
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self.coming["F", mb_index] = prev_stage_outputs

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return self.going.pop(("B", mb_index), ())

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self.coming["B", mb_index] = next_stage_bwd_outputs

    # computation

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Tensors:
        sent = self.body.forward(fwd_chunk_id, self.take("F", fwd_chunk_id))
        if not self.has_backward:
            self.body.saved.pop(fwd_chunk_id)
        after = self.index + 1
        if after < len(self.places) and self.places[after] != self.places[self.index]:
            self.going["F", fwd_chunk_id] = sent
        return sent

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self.has_backward:
            run = self.body.backward if full_backward else self.body.backward_inputs
            returned = run(bwd_chunk_id, self.take("B", bwd_chunk_id), lambda: self.tangent)
            if self.index:
                self.going["B", bwd_chunk_id] = returned

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.has_backward:
            self.body.backward_weights(bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.results = self.body.finish(gradients=self.has_backward)

    def clear_runtime_states(self) -> None:
        self.forget()


class PipelineRunner(StepRunner):
    """Runs a plan's stages on this rank.

    Args:
        bodies: this rank's stages, by number.
        held: the rank's parameters by position among the program's inputs: its own, and copies of other stages'.
    """

    def __init__(
        self, program: Program, decisions: Decisions, stages: Stages, schedule: Schedule, places: tuple[int, ...],
        bodies: Mapping[int, StageBody], held: Mapping[int, nn.Parameter], groups: StageGroups,
    ) -> None:
        mine = [i for i in held if stages.parts[i] and places[stages.owners[i]] == groups.place]
        parameters = {program.inputs[i].value: held[i] for i in mine}
        super().__init__(program, decisions.inputs, groups.inside,
                         {**parameters, ANCHOR: nn.Parameter(torch.zeros(()))})
        self.decisions, self.stages, self.stage_groups, self.places = decisions, stages, groups, places
        self.held, self.place = held, groups.place
        by_name = {program.inputs[i].name: program.inputs[i].value for i in mine}
        self.gradients: tuple[Gradient | None, ...] = tuple(
            self.gradient(by_name[o.name]) if o.kind == "gradient" and o.name in by_name else None
            for o in program.outputs
        )
        self.learns = any(o.kind == "gradient" for o in program.outputs)
        self.exchange = Exchange(groups)
        self.torch_stages = [PipelineStage(s, body, self.exchange, groups, places) for s, body in bodies.items()]
        self.torch_schedule = prepared_schedule(
            self.torch_stages, schedule.ranks, schedule.microbatches,
            lambda stage: bodies[stage].unshard(), lambda stage: bodies[stage].reshard(),
        )

    @torch.no_grad()
    def forward(self, tensors: Mapping[int, torch.Tensor], seed: int, *, gradients: bool = True) -> Forward:
        """Run all actions; without ``gradients`` those of backward do nothing.

        Args:
            tensors: global tensors of the inputs (the whole batch) and buffers, by value id.
            seed: the step's seed for random ops.
        """
        with peers_may_stop():
            self.refresh_copies()
            for one in self.torch_stages:
                body = one.body
                whole = [(e.value, body.stage.values[e.value]) for e in body.program.inputs]
                body.begin({v: tensors[w] for v, w in whole if w in tensors}, seed)
            run_actions(self.torch_schedule, backward=gradients and self.learns)
            self.exchange.finish()
            found: dict[int, torch.Tensor] = {}
            parts: dict[int, dict[int, torch.Tensor]] = {}  # gradient output -> stage -> its part
            for one in self.torch_stages:
                for position, tensor in one.results.items():
                    if self.program.outputs[position].kind == "gradient":
                        parts.setdefault(position, {})[one.index] = tensor
                    else:
                        found[position] = tensor
                one.forget()
            return Forward(self.everywhere(found), self.to_owners(parts), ())

    @torch.no_grad()
    def backward(self, run: Forward, tangent: torch.Tensor) -> dict[int, DTensor]:
        """The gradients of ``run`` for the parameters that this rank owns, once, times ``tangent`` (a scalar)."""
        return self.handed_out(self.gradients, run, tangent)

    def output(self, run: Forward, index: int, layout: Layout) -> torch.Tensor:
        """As :meth:`StepRunner.output`; of microbatches joined along a dim the plan must leave whole rows."""
        join = self.program.time.outputs[index] if self.program.time is not None else "same"
        if isinstance(join, int) and layout != replicated(self.groups.mesh):
            raise FxparError(f"the output {self.program.outputs[index].name} is left cut, and joined of microbatches")
        return super().output(run, index, layout)

    def everywhere(self, found: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Results of every stage on every rank of the pipeline (the loss, outputs, buffers)."""
        results: dict[int, torch.Tensor] = {}
        for position, output in enumerate(self.program.outputs):
            if output.kind == "gradient":
                continue
            stage = next(s for s, one in enumerate(self.stages.stages) if position in one.outputs)
            results[position] = self.from_stage(stage, found.get(position))
        return results

    def from_stage(self, stage: int, tensor: torch.Tensor | None) -> torch.Tensor:
        """A tensor of the rank of ``stage``, on every rank of the pipeline; its shape need not be known."""
        place, device = self.places[stage], self.groups.device
        source = self.stage_groups.rank_at(place)
        told: list[Any] = [None if tensor is None else (tuple(tensor.shape), tensor.dtype)]
        if len(self.places) == 1 or dist.get_world_size(self.stage_groups.pipeline) == 1:
            assert tensor is not None
            return tensor
        dist.broadcast_object_list(told, src=source, group=self.stage_groups.pipeline)
        shape, dtype = told[0]
        sent = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor.contiguous()
        dist.broadcast(sent, src=source, group=self.stage_groups.pipeline)
        return sent

    def to_owners(self, parts: Mapping[int, Mapping[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Gradients of the parameters that this rank owns, in the order of ``gradients``; parts that other ranks'
        stages have are sent to the owner."""
        found: list[torch.Tensor] = []
        by_name = {e.name: i for i, e in enumerate(self.program.inputs) if e.kind == "parameter"}
        ran = any(one.has_backward for one in self.torch_stages)
        for position, output in enumerate(self.program.outputs):
            if output.kind != "gradient" or not ran:
                continue
            index, mine = by_name[output.name], parts.get(position, {})
            owner = self.places[self.stages.owners[index]]
            total: torch.Tensor | None = None
            for stage in reversed(self.stages.parts[index]):
                place, part = self.places[stage], mine.get(stage)
                if place != owner and part is not None:
                    self.exchange.send([part], owner)
                elif place != owner and owner == self.place:
                    part = self.exchange.receive([self.stored_type(index)], place).take()[0]
                if owner == self.place:
                    assert part is not None
                    total = part if total is None else total + part
            if total is not None:
                found.append(total)
        self.exchange.finish()
        return found

    def stored_type(self, index: int) -> TensorType:
        """Local type of the parameter at an input position, as it is stored."""
        value = self.program.inputs[index].value
        dims, layout = self.program.dims[value], self.decisions.inputs[index]
        shape = local_shape(dims, layout, self.groups.mesh, self.groups.coords)
        return TensorType(shape, self.program.types[value].dtype)

    def refresh_copies(self) -> None:
        """Send the values of parameters that stages on several ranks read from their owners to the copies."""
        for index, users in self.copies():
            owner = self.places[self.stages.owners[index]]
            if owner == self.place:
                parameter: Any = self.held[index]
                for place in users:
                    self.exchange.send([parameter.to_local()], place)
            elif self.place in users:
                copy: Any = self.held[index]
                copy.to_local().copy_(self.exchange.receive([self.stored_type(index)], owner).take()[0])
        self.exchange.finish()

    def copies(self) -> list[tuple[int, tuple[int, ...]]]:
        """(input position, places of the ranks that hold a copy) of every parameter that has copies."""
        found = []
        for index, owner in enumerate(self.stages.owners):
            using = {self.places[s] for s, one in enumerate(self.stages.stages) if index in one.inputs}
            if owner >= 0 and using - {self.places[owner]}:
                found.append((index, tuple(sorted(using - {self.places[owner]}))))
        return found

    def whole(self, index: int, of: str = "values") -> torch.Tensor | None:
        """The whole value (or ``"gradient"``) of the parameter at an input position, on every rank; None where there
        is no gradient."""
        stage = self.stages.owners[index]
        mine: torch.Tensor | None = None
        there = True
        if self.places[stage] == self.place:
            parameter: Any = self.held[index]
            tensor = parameter.detach() if of == "values" else parameter.grad
            there = tensor is not None
            mine = None if tensor is None else tensor.full_tensor().clone()
        told: list[Any] = [there]
        source = self.stage_groups.rank_at(self.places[stage])
        dist.broadcast_object_list(told, src=source, group=self.stage_groups.pipeline)
        return self.from_stage(stage, mine) if told[0] else None

