"""What every reshard between two sets of layouts costs, all pairs at once.

The chain of a pair is the one that :func:`fxpar.plans.reshard.reshard_steps` finds: the same weights, minimised over
the same graph of layouts, by passing over that graph in order with all pairs side by side. A node of the graph says
per mesh axis whether it has its old placement, Replicate, or its new one; moves only go forward, so one pass is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fxpar.plans.layout import REPLICATE, Dims, Layout, Placement, Shard, largest_size, valid_layout
from fxpar.plans.mesh import Mesh
from fxpar.plans.reshard import COLLECTIVE_WEIGHT, COLLECTIVES, LOCAL_WEIGHT, StepKind, kind_of_step, next_order

IntArray = NDArray[np.int64]
PriceOf = Callable[[StepKind, int, int, bool], int]
"""(kind, axis, elements of the step, whether it travels in a bucket) -> ns."""
PriceKind = Literal["reshard", "gradient", "input"]
"""Which steps travel in buckets: none; the reductions that end the chain; the gathering that begins it."""
Track = tuple[IntArray, ...]
"""What is known of a chain's price so far; the price comes first, what of it is no communication last."""

#: Added up a few times it stays an int64, and no honest weight comes near.
NEVER = 2**58
#: Pairs at a time: what is computed for them stays in the processor's cache.
CHUNK = 12_000

OLD, WHOLE, NEW = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Moves:
    """One axis' moves, flat over (layout, new placement): the two weights, ns, ns in a bucket (where ``joins``: in a
    gradient's or input's bucket), ns of it that are no communication, and whether it is an alias."""

    weight: IntArray
    tie: IntArray
    price: IntArray
    bucket: IntArray
    local: IntArray
    joins: NDArray[np.bool_]
    alias: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Chains:
    """The best chains of all pairs to one node: what they are compared by, one after the other, and their prices."""

    weight: IntArray
    tie: IntArray
    order: IntArray
    track: Track

    def or_better(self, other: _Chains) -> _Chains:
        better = other.weight < self.weight
        equal = other.weight == self.weight
        better |= equal & (other.tie < self.tie)
        equal &= other.tie == self.tie
        better |= equal & (other.order < self.order)
        return _Chains(
            np.where(better, other.weight, self.weight), np.where(better, other.tie, self.tie),
            np.where(better, other.order, self.order),
            tuple(np.where(better, b, a) for a, b in zip(self.track, other.track, strict=True)),
        )


class ReshardTable:
    """Prices of all reshards of tensors with given logical dims on a mesh, between layouts of given placements.

    Args:
        price_of: ns of one step.
        kind: which steps travel in buckets.
        placements: all that occur on any axis of the layouts asked for.
    """

    def __init__(
        self, dims: Dims, mesh: Mesh, placements: Sequence[Placement], price_of: PriceOf, kind: PriceKind
    ) -> None:
        self.dims, self.mesh, self.price_of, self.kind = dims, mesh, price_of, kind
        self.placements = [REPLICATE, *(p for p in dict.fromkeys(placements) if p != REPLICATE)]
        self.number = {p: i for i, p in enumerate(self.placements)}
        self.axes = len(mesh.sizes)
        count = len(self.placements)
        self.strides = [count ** (self.axes - 1 - a) for a in range(self.axes)]

    def numbers(self, layouts: Sequence[Layout]) -> IntArray:
        """[layouts, axes] placement numbers."""
        return np.array([[self.number[p] for p in layout] for layout in layouts], np.int64)

    @cached_property
    def sizes(self) -> IntArray:
        """Per layout of the placements, elements of the largest shard; 0 where the layout is not valid."""
        layouts = product(self.placements, repeat=self.axes)
        return np.array(
            [max(largest_size(self.dims, lay, self.mesh), 1) if valid_layout(lay, self.dims) else 0 for lay in layouts],
            np.int64,
        )

    @cached_property
    def moves(self) -> tuple[Moves, ...]:
        return tuple(self._moves(axis) for axis in range(self.axes))

    def _moves(self, axis: int) -> Moves:
        count, total = len(self.placements), len(self.sizes)
        digits = [(np.arange(total) // stride) % count for stride in self.strides]
        overlap = np.array([[isinstance(a, Shard) and isinstance(b, Shard) and a.overlaps(b) for b in self.placements]
                            for a in self.placements])
        empty = any(0 in atoms for atoms in self.dims)
        before, new = np.arange(total)[:, None], np.arange(count)[None, :]
        after = before + (new - digits[axis][:, None]) * self.strides[axis]
        allowed = (self.sizes[before] > 0) & (self.sizes[after] > 0)
        for inner in range(axis + 1, self.axes):
            allowed &= ~overlap[digits[axis], digits[inner]][:, None] & ~overlap[new, digits[inner][:, None]]
        weight = np.full((total, count), NEVER, np.int64)
        tie, price, bucket, local = (np.zeros_like(weight) for _ in range(4))
        joins, alias = np.zeros(weight.shape, bool), np.zeros(weight.shape, bool)
        joining = {"reshard": (), "gradient": ("all_reduce", "reduce_scatter", "alias"), "input": ("all_gather",)}
        ranks = self.mesh.sizes[axis]
        full = np.maximum(self.sizes[before], self.sizes[after])
        for (i, old), (j, to) in product(enumerate(self.placements), repeat=2):
            kind = kind_of_step(old, to, self.dims, ranks) if i != j else None
            if kind is None:
                continue
            rows = np.flatnonzero((digits[axis] == i) & allowed[:, j])
            if kind in COLLECTIVES:
                elements = full[rows, j]
                moved = (2 if kind == "all_reduce" else 1) * (0 if empty else elements) * (ranks - 1) // ranks
                weight[rows, j] = moved + COLLECTIVE_WEIGHT
                tie[rows, j] = moved * (self.axes - axis)
            else:
                elements = self.sizes[after[rows, j]]
                weight[rows, j] = LOCAL_WEIGHT
                tie[rows, j] = 0 if kind == "alias" or empty else elements
            different, place = np.unique(elements, return_inverse=True)
            joins[rows, j] = kind in joining[self.kind]
            alias[rows, j] = kind == "alias"
            for found, shared in ((price, False), (bucket, True)):
                prices = [self.price_of(kind, axis, 0 if empty else int(n), shared) for n in different]
                found[rows, j] = np.array(prices, np.int64)[place.reshape(-1)] if prices else 0
            if kind not in COLLECTIVES:
                local[rows, j] = price[rows, j]
        return Moves(weight.ravel(), tie.ravel(), price.ravel(), bucket.ravel(), local.ravel(), joins.ravel(),
                     alias.ravel())

    def _begin(self, shape: tuple[int, int]) -> Track:
        zero = np.zeros(shape, np.int64)
        between = {"reshard": (), "gradient": (zero,), "input": (np.ones(shape, bool),)}[self.kind]
        return (zero, *between, zero)

    def _onward(self, track: Track, move: Moves, index: IntArray) -> Track:
        """The track after one more step."""
        price, local = move.price[index], track[-1] + move.local[index]
        if self.kind == "reshard":
            return track[0] + price, local
        if self.kind == "gradient":
            # the price if no other step followed; the price if something else than a reduction did
            alone = track[1] + price
            return np.where(move.joins[index], track[0] + move.bucket[index], alone), alone, local
        shared = track[1] & move.joins[index]
        return track[0] + np.where(shared, move.bucket[index], price), track[1] & move.alias[index], local

    def matrix(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> tuple[IntArray, IntArray]:
        """[sources, targets] ns, and ns of them that are no communication.

        Raises:
            ValueError: no chain leads from some source to some target.
        """
        start, end = self.numbers(sources), self.numbers(targets)
        rows = max(1, CHUNK // max(len(targets), 1))
        parts = [self._chunk(start[i:i + rows], end) for i in range(0, len(sources), rows)]
        whole, local = (np.concatenate(each) for each in zip(*parts, strict=True))
        return whole, local

    def _chunk(self, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
        count = len(self.placements)
        shape = (len(start), len(end))
        old = [start[:, a][:, None] for a in range(self.axes)]
        new = [end[:, a][None, :] for a in range(self.axes)]
        same = [o == n for o, n in zip(old, new, strict=True)]
        reached: dict[tuple[int, ...], _Chains] = {}
        for node in product((OLD, WHOLE, NEW), repeat=self.axes):
            best: _Chains | None = None
            for axis, digit in enumerate(node):
                for earlier in range(digit):
                    origin = (*node[:axis], earlier, *node[axis + 1:])
                    before = reached[origin]
                    layout = sum((old[a], 0, new[a])[d] * self.strides[a] for a, d in enumerate(origin))
                    index = layout * count + (0 if digit == WHOLE else new[axis])
                    stay = old[axis] == 0 if digit == WHOLE else new[axis] == 0 if earlier == WHOLE else same[axis]
                    move = self.moves[axis]
                    order = next_order(before.order, axis, True if digit == WHOLE else new[axis] == 0, self.axes)
                    after = _Chains(
                        before.weight + np.where(stay, 0, move.weight[index]),
                        before.tie + np.where(stay, 0, move.tie[index]),
                        np.where(stay, before.order, order),
                        tuple(np.where(stay, a, b)
                              for a, b in zip(before.track, self._onward(before.track, move, index), strict=True)),
                    )
                    best = after if best is None else best.or_better(after)
            zero = np.zeros(shape, np.int64)
            reached[node] = best or _Chains(zero, zero, zero, self._begin(shape))
        end_of = reached[(NEW,) * self.axes]
        if (end_of.weight >= NEVER).any():
            raise ValueError("no chain of reshards between some of the layouts")
        return end_of.track[0], end_of.track[-1]


class KnownPairs:
    """Prices of reshards of tensors with given logical dims on a mesh, each pair of layouts computed once."""

    def __init__(self, dims: Dims, mesh: Mesh, price_of: PriceOf, kind: PriceKind) -> None:
        self.dims, self.mesh, self.price_of, self.kind = dims, mesh, price_of, kind
        self.number: dict[Layout, int] = {}
        self.prices: IntArray = np.zeros((0, 0), np.int64)
        self.local: IntArray = np.zeros((0, 0), np.int64)
        self.known: NDArray[np.bool_] = np.zeros((0, 0), bool)

    def table(self, sources: Sequence[Layout], targets: Sequence[Layout], sent: bool = False) -> IntArray:
        """[sources, targets] ns; ``sent``: of communication alone.

        Raises:
            ValueError: no chain leads from some source to some target.
        """
        rows = np.array([self.number.setdefault(lay, len(self.number)) for lay in sources])
        columns = np.array([self.number.setdefault(lay, len(self.number)) for lay in targets])
        more = len(self.number) - len(self.known)
        if more:
            self.prices, self.local = np.pad(self.prices, (0, more)), np.pad(self.local, (0, more))
            self.known = np.pad(self.known, (0, more))
        missing = ~self.known[np.ix_(rows, columns)]
        # sources that lack the same targets, all at once
        groups: dict[bytes, list[int]] = {}
        for i in np.flatnonzero(missing.any(axis=1)):
            groups.setdefault(missing[i].tobytes(), []).append(int(i))
        for own in groups.values():
            lacking: list[int] = np.flatnonzero(missing[own[0]]).tolist()
            some, others = [sources[i] for i in own], [targets[j] for j in lacking]
            made = ReshardTable(self.dims, self.mesh, [p for lay in (*some, *others) for p in lay], self.price_of,
                                self.kind)
            place = np.ix_(rows[own], columns[lacking])
            self.prices[place], self.local[place] = made.matrix(some, others)
            self.known[place] = True
        asked = np.ix_(rows, columns)
        return self.prices[asked] - self.local[asked] if sent else self.prices[asked]
