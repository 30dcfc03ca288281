"""How one layout becomes another: the cheapest chain of single-axis steps.

The same chain is priced by the compiler and lowered by the runtime, so price and program cannot disagree. A chain is
found by Dijkstra's algorithm over the layouts in which every axis has its old placement, Replicate, or its new
placement, and never goes back; a step's weight is the number of elements that cross the axis per rank (ring
algorithms). Of chains of equal weight the one is taken that moves less over outer axes and copies less.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import msgspec

from fxpar.plans.layout import (
    REPLICATE,
    Dims,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    largest_size,
    layout_text,
    valid_layout,
)
from fxpar.plans.mesh import Mesh

StepKind: TypeAlias = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "to_partial", "alias"
]
COLLECTIVES: frozenset[str] = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all"})


COLLECTIVE_WEIGHT, LOCAL_WEIGHT = 64, 1
"""Elements that a step weighs besides what it moves: a collective's latency, and a preference for short chains."""


class Step(msgspec.Struct, frozen=True):
    """One step on mesh axis ``axis``: ``before`` and ``after`` differ on that axis only.

    ``slice`` keeps this rank's chunk; ``to_partial`` keeps the value on coordinate 0 of the axis and zeros elsewhere
    (for a pending maximum or minimum: keeps it everywhere). Both are local. ``alias`` changes nothing: two runs that
    start together and divide evenly cut the tensor into the same pieces (``(8 128)`` over 4 ranks, and its ``8``).
    """

    kind: StepKind
    axis: int
    before: Layout
    after: Layout

    @property
    def reduce(self) -> str:
        """Reduction of the pending value (``"sum"`` when nothing is pending)."""
        for placement in (self.before[self.axis], self.after[self.axis]):
            if isinstance(placement, Partial):
                return placement.reduce
        return "sum"


def step_kind(old: Placement, new: Placement) -> StepKind | None:
    """The step that turns ``old`` into ``new`` on one axis, None when none does directly."""
    match old, new:
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
        case Shard(), Replicate():
            return "all_gather"
        case Shard(), Shard():
            return "all_to_all"
        case Replicate(), Shard():
            return "slice"
        case Replicate(), Partial():
            return "to_partial"
    return None


def same_pieces(old: Shard, new: Shard, dims: Dims, ranks: int) -> bool:
    """True when two overlapping runs cut into the same pieces over ``ranks``."""
    if (old.dim, old.first) != (new.dim, new.first):
        return False
    shorter = min(old.length, new.length)
    return math.prod(dims[old.dim][old.first : old.first + shorter]) % ranks == 0


def kind_of_step(old: Placement, new: Placement, dims: Dims, ranks: int) -> StepKind | None:
    """The step from ``old`` to another placement on an axis of ``ranks``, for a tensor with dims ``dims``."""
    if isinstance(old, Shard) and isinstance(new, Shard) and old.overlaps(new):
        return "alias" if same_pieces(old, new, dims, ranks) else None
    return step_kind(old, new)


def _legal(layout: Layout, axis: int, new: Placement) -> bool:
    """Shards nest outer axis first: a run may be cut or joined on an axis only while no inner axis cuts it."""
    inner = [p for p in layout[axis + 1 :] if isinstance(p, Shard)]
    return not any(isinstance(mine, Shard) and mine.overlaps(p) for mine in (layout[axis], new) for p in inner)


def step_elements(kind: StepKind, before: Layout, after: Layout, axis: int, dims: Dims, mesh: Mesh) -> int:
    """Elements one rank sends for the step (0 for local steps); the largest shard counts."""
    n = mesh.sizes[axis]
    full = max(largest_size(dims, before, mesh), largest_size(dims, after, mesh))
    if kind == "all_reduce":
        return 2 * full * (n - 1) // n
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return full * (n - 1) // n
    return 0


@lru_cache(maxsize=200_000)
def reshard_steps(source: Layout, target: Layout, dims: Dims, mesh: Mesh) -> tuple[Step, ...]:
    """Steps from ``source`` to ``target`` for a tensor with logical dims ``dims`` (empty when equal).

    Raises:
        ValueError: a layout is not valid for ``dims``.
    """
    if source == target:
        return ()
    if not (valid_layout(source, dims) and valid_layout(target, dims)):
        raise ValueError(f"no reshard {layout_text(source)} -> {layout_text(target)} for dims {dims}")
    onward = [_onward(s, t) for s, t in zip(source, target, strict=True)]
    queue: list[tuple[int, int, int, tuple[Step, ...], Layout]] = [(0, 0, 0, (), source)]
    done: set[Layout] = set()
    while queue:
        # the order breaks the ties that are left and is never the same twice, so nothing behind it is compared
        weight, tie, order, steps, layout = heapq.heappop(queue)
        if layout == target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for axis, moves in enumerate(onward):
            for new in moves.get(layout[axis], ()):
                kind = kind_of_step(layout[axis], new, dims, mesh.sizes[axis])
                after = (*layout[:axis], new, *layout[axis + 1 :])
                if kind is None or after in done or not _legal(layout, axis, new) or not valid_layout(after, dims):
                    continue
                moved = step_elements(kind, layout, after, axis, dims, mesh)
                copied = largest_size(dims, after, mesh) if kind in ("slice", "to_partial") else 0
                heapq.heappush(queue, (
                    weight + moved + (COLLECTIVE_WEIGHT if kind in COLLECTIVES else LOCAL_WEIGHT),
                    tie + moved * (len(mesh.axes) - axis) + copied,
                    next_order(order, axis, new == REPLICATE, len(mesh.axes)),
                    (*steps, Step(kind, axis, layout, after)), after,
                ))
    raise ValueError(f"no reshard {layout_text(source)} -> {layout_text(target)} for dims {dims}")


def next_order(order: Any, axis: int, whole: Any, axes: int) -> Any:
    """The order of a chain with one more step, on ``axis`` and to Replicate if ``whole``: another number for every
    chain between two layouts, the smaller one the shorter chain, and then the one that begins on an outer axis.
    ``order`` and ``whole`` may be arrays, of many chains side by side."""
    return order * (2 * axes + 1) + 2 * axis + (2 - whole)


def _onward(source: Placement, target: Placement) -> dict[Placement, tuple[Placement, ...]]:
    """Per placement of an axis on the way, the next ones: to Replicate, and from there, or at once, to the target."""
    moves = {source: tuple(p for p in dict.fromkeys((REPLICATE, target)) if p != source)}
    if source != REPLICATE and target != REPLICATE:
        moves[REPLICATE] = (target,)
    return moves
