"""What stages hand to each other: tensors of known shapes, sent and received without waiting, let go as early as can be
known that they have arrived.

Two ranks of a pipeline send and receive in one common order (see ``schedule_problems``). So when something has come
from a rank, that rank has asked for all that this one sent to it before, and waiting for those sends ends at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxpar.plans.program import TensorType
from fxpar.runtime.local import torch_dtype
from fxpar.runtime.stage_groups import StageGroups

Tensors = tuple[torch.Tensor, ...]


class Incoming:
    """Tensors under way to this rank."""

    def __init__(self, exchange: Exchange, place: int, tensors: Tensors, works: Sequence[Any], order: int) -> None:
        self.exchange, self.place, self.tensors, self.works, self.order = exchange, place, tensors, works, order

    def take(self) -> Tensors:
        """Wait for them."""
        for work in self.works:
            work.wait()
        self.exchange.arrived(self.place, self.order)
        return self.tensors


class Exchange:
    """Sends and receives of one rank along the pipeline."""

    def __init__(self, groups: StageGroups) -> None:
        self.groups = groups
        self.count = 0
        self.under_way: dict[int, deque[tuple[int, Any, torch.Tensor]]] = {}

    def send(self, tensors: Sequence[torch.Tensor], place: int) -> None:
        """Start to send to the rank at ``place`` of the pipeline."""
        waiting = self.under_way.setdefault(place, deque())
        for tensor in tensors:
            if tensor.numel():
                sent = tensor.contiguous()
                work = dist.isend(sent, self.groups.rank_at(place), group=self.groups.pipeline)
                waiting.append((self.count, work, sent))
        self.count += 1

    def receive(self, types: Sequence[TensorType], place: int) -> Incoming:
        """Start to receive from the rank at ``place``."""
        device = self.groups.inside.device
        tensors = tuple(torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=device) for t in types)
        source = self.groups.rank_at(place)
        works = [dist.irecv(t, source, group=self.groups.pipeline) for t in tensors if t.numel()]
        self.count += 1
        return Incoming(self, place, tensors, works, self.count - 1)

    def arrived(self, place: int, order: int) -> None:
        """Let go of all that was sent to ``place`` before number ``order``."""
        waiting = self.under_way.get(place, deque())
        while waiting and waiting[0][0] < order:
            waiting.popleft()[1].wait()

    def finish(self) -> None:
        """Wait for all that was sent."""
        for waiting in self.under_way.values():
            while waiting:
                waiting.popleft()[1].wait()
