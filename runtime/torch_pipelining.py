"""The private names of ``torch.distributed.pipelining`` that fxpar builds on, all in this one place.

Torch writes the orders of its schedules, adds gatherings, sends and receives to them, and runs the result; what stands
behind a stage is ours (see ``fxpar.runtime.pipeline``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import (
    RESHARD,
    UNSHARD,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _get_1f1b_rank_ops,
    _get_warmup_ops,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

__all__ = ["PipelineStageBase", "ScheduleRuntime", "compute_order", "prepared_schedule", "run_actions",
           "with_communication"]

ScheduleRuntime = _PipelineScheduleRuntime
_Order = dict[int, list[Any]]


class PipelineStageBase(_PipelineStageBase):
    """What torch asks of a stage before a schedule runs, answered for stages of which nothing has to be found out by
    running them: the plan says it all, and they send and receive on their own."""

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def _create_grad_recv_info(self, act_send_info: dict[Any, Any]) -> tuple[()]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


def prepared_schedule(
    stages: Sequence[PipelineStageBase], rows: Sequence[Sequence[str]], microbatches: int,
    unshard: Callable[[int], None], reshard: Callable[[int], None],
) -> ScheduleRuntime:
    """What walks through ``rows`` (every rank's actions, sends and receives among them) on this rank's ``stages``.

    Args:
        unshard, reshard: what these actions do, given the stage's number.
    """
    schedule = ScheduleRuntime(list(stages), microbatches, scale_grads=False, backward_requires_autograd=False)
    actions: _Order = {rank: [_Action.from_str(text) for text in row] for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(actions, format="compute_comms")
    schedule.register_custom_function(UNSHARD, lambda action, _: unshard(action.stage_index))
    schedule.register_custom_function(RESHARD, lambda action, _: reshard(action.stage_index))
    return schedule


def run_actions(schedule: ScheduleRuntime, *, backward: bool) -> None:
    """Run this rank's actions; without ``backward`` its stages are told that there is none."""
    schedule._has_backward = backward
    schedule.step(return_outputs=False)


def compute_order(cls_name: str, ranks: int, stages: int, microbatches: int, *, v_shaped: bool) -> _Order:
    """The computations of every rank as torch's schedule class orders them, idle slots left out.

    Args:
        cls_name: a class of ``torch.distributed.pipelining.schedules``; of 1F1B torch's class runs the order but says
            it wrongly (the last rank's begins with microbatch 1), so there it is asked of what orders the interleaved
            schedule, for one stage per rank.
        v_shaped: stages go down the ranks and up again.

    Raises:
        ValueError: the class refuses these numbers.
    """
    if cls_name == "Schedule1F1B":
        return {rank: _one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)}
    cls: Any = getattr(torch_schedules, cls_name)
    mapping = generate_stage_to_rank_mapping(ranks, stages, style="v" if v_shaped else "loop")
    # what the classes ask of a stage before anything runs; all ranks' orders are made on every rank
    mine = [
        SimpleNamespace(stage_index=s, num_stages=stages, group_size=ranks, group_rank=0, submod=nn.Identity(),
                        is_first=s == 0, is_last=s == stages - 1)
        for s, rank in mapping.items() if rank == 0
    ]
    alone = issubclass(cls, torch_schedules.PipelineScheduleSingle)
    made = cls(mine[0] if alone else mine, microbatches)
    return {rank: [a for a in row if a is not None and a.is_compute_op] for rank, row in made.pipeline_order.items()}


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Any]:
    warmup = _get_warmup_ops(rank, 1, microbatches, ranks, microbatches, multiply_factor=1)

    def stage(op: int) -> int:
        return rank

    order = _get_1f1b_rank_ops(1, ranks, warmup, microbatches - warmup, warmup, rank, stage, stage)
    return [action for action in order if action is not None]


def with_communication(order: _Order, stages: int, microbatches: int) -> _Order:
    """The order with gatherings, reductions, sends and receives, placed as torch places them.

    Two actions that may overlap run one after the other here, so they stand so: of the pair, torch would send what the
    first has made after the second only.
    """
    order = {rank: [one for action in row for one in action.sub_actions or (action,)] for rank, row in order.items()}
    rank_of = {action.stage_index: rank for rank, row in order.items() for action in row}
    lowered: _Order = {}
    for rank, row in order.items():
        gathered: list[Any] = list(_add_unshard_reshard(row))
        lowered[rank] = list(_add_reduce_grad(gathered, microbatches))
    return _add_send_recv(lowered, stage_to_rank=rank_of.__getitem__, num_stages=stages)
