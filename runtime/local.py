"""The local program of one rank: what it runs, as plain data, no tensors.

Values are numbered in the order in which steps define them (SSA); ``types[v]`` is the LOCAL shape and dtype of local
value ``v`` and ``origins[v]`` the program value and layout it stands for (-1 and no layout for one that an expansion
makes on the way). The sequence of steps is the same on every
rank (kind, op, axis, order); shapes, lengths and positions differ.

An axis acts on one region of a tensor at a time: the local tensor is seen as ``[outer, size, inner]`` (a :class:`Cut`)
or ``[outer, a, middle, b, inner]`` (a :class:`Swap`), which covers minor runs of compound dims too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, TypeAlias

import torch

from fxpar.plans.layout import Layout
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Arg, TensorType

Phase: TypeAlias = Literal["forward", "backward"]
CollectiveKind: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "halo", "halo_sum"]


@dataclass(frozen=True)
class Cut:
    """A tensor as ``[outer, sum(lengths), inner]`` whole and ``[outer, lengths[i], inner]`` on peer ``i``."""

    outer: int
    lengths: tuple[int, ...]
    inner: int


@dataclass(frozen=True)
class Swap:
    """One region is joined while another is cut: regions ``a`` and ``b`` of ``[outer, a, middle, b, inner]``.

    Peer ``i`` holds ``joined[i]`` elements of the joined region before and ``cut[i]`` of the cut region after.
    ``joined_first``: the joined region is ``a`` (the outer one).
    """

    outer: int
    middle: int
    inner: int
    joined: tuple[int, ...]
    cut: tuple[int, ...]
    joined_first: bool


@dataclass(frozen=True)
class Halo:
    """A tensor as ``[outer, lengths[i], inner]`` on peer ``i``, of which it wants the window ``[starts[i], ends[i])``
    of the whole, ``fill`` where that reaches beyond the ends (see :class:`fxpar.rules.expansion.Exchange`)."""

    outer: int
    lengths: tuple[int, ...]
    inner: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    fill: float


Geometry: TypeAlias = Cut | Swap | Halo


@dataclass(frozen=True)
class OpStep:
    """One op call on local tensors. ``operands``: all local values the call may read, the same on every rank."""

    op: str
    args: tuple[Arg, ...]
    operands: tuple[int, ...]
    outputs: tuple[int, ...]
    node: int
    phase: Phase
    recomputed: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        return self.operands

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(v for v in self.outputs if v >= 0)


@dataclass(frozen=True)
class CollectiveStep:
    """One collective on mesh axis ``axis``.

    ``values`` holds one tensor, or a bucket of several of one dtype; ``geometries`` one entry per value (none for an
    ``all_reduce``). ``elements`` counts the elements of the largest rank's full tensors (before a reduce-scatter,
    after an all-gather; of a halo what goes to one neighbour), the same on all ranks.
    """

    kind: CollectiveKind
    axis: int
    reduce: str
    values: tuple[int, ...]
    outputs: tuple[int, ...]
    geometries: tuple[Geometry, ...]
    elements: int
    dtype: str
    phase: Phase

    @property
    def reads(self) -> tuple[int, ...]:
        return self.values

    @property
    def writes(self) -> tuple[int, ...]:
        return self.outputs

    @property
    def bytes(self) -> int:
        """Bytes of the full tensors on the largest rank."""
        return self.elements * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class LocalStep:
    """A step without communication.

    ``slice`` keeps elements ``[start, start + length)`` of the middle of ``[outer, size, inner]``; ``to_partial``
    keeps the value where ``keep``, else zeros of the same shape.
    """

    kind: Literal["slice", "to_partial"]
    axis: int
    value: int
    output: int
    phase: Phase
    outer: int = 1
    start: int = 0
    length: int = 0
    inner: int = 1
    keep: bool = True

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.value,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.output,)


@dataclass(frozen=True)
class AddStep:
    """``value`` is added to ``total`` in place; ``output`` names the total from then on."""

    total: int
    value: int
    output: int
    phase: Phase

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.total, self.value)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.output,)


@dataclass(frozen=True)
class WaitStep:
    """Here the collective that makes ``values`` (all its results) is finished, read or not: its operands go."""

    values: tuple[int, ...]
    phase: Phase

    @property
    def reads(self) -> tuple[int, ...]:
        return self.values

    @property
    def writes(self) -> tuple[int, ...]:
        return ()


AnyStep: TypeAlias = OpStep | CollectiveStep | LocalStep | AddStep | WaitStep


@dataclass(frozen=True)
class LocalProgram:
    """All steps of one rank. ``inputs`` and ``outputs`` are aligned with those of the global program."""

    mesh: Mesh
    coords: tuple[int, ...]
    types: tuple[TensorType, ...]
    origins: tuple[tuple[int, Layout], ...]
    inputs: tuple[int, ...]
    steps: tuple[AnyStep, ...]
    outputs: tuple[int, ...]


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a program's dtype name.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype '{name}'")
    return dtype


@cache
def dtype_bytes(name: str) -> int:
    """Bytes of one element."""
    return torch_dtype(name).itemsize


def type_bytes(type_: TensorType) -> int:
    """Bytes of a dense tensor of the type."""
    return prod(type_.shape) * dtype_bytes(type_.dtype)


def collectives(local: LocalProgram) -> tuple[CollectiveStep, ...]:
    """The collectives of a local program in order."""
    return tuple(step for step in local.steps if isinstance(step, CollectiveStep))


def last_uses(local: LocalProgram) -> list[tuple[int, ...]]:
    """Per step, the local values that no later step and no output reads: what may be freed after it."""
    kept = set(local.outputs)
    seen: set[int] = set()
    freed: list[tuple[int, ...]] = []
    for step in reversed(local.steps):
        now = tuple(v for v in dict.fromkeys((*step.reads, *step.writes)) if v not in seen and v not in kept)
        seen.update(now)
        freed.append(now)
    return freed[::-1]
