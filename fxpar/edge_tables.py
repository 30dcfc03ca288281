"""The tables of edges: what it costs to bring a value from the layouts it is made in to those it is read in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from fxpar.modes import Copies, Pair
from fxpar.plans.layout import Dims, Layout, Partial, Placement
from fxpar.plans.program import TensorType
from fxpar.prices import Prices
from fxpar.reshard_tables import PriceKind
from fxpar.solver.graph import BoolArray
from fxpar.solver.problem import FORBIDDEN, IntArray


@dataclass(frozen=True)
class EdgeFlags:
    """``price``: what travels in buckets on the edge; ``keep_sums``: pending sums may not be reduced; ``pair``: the
    modes at both ends, where they matter."""

    price: PriceKind
    keep_sums: bool = False
    pair: Pair | Copies | None = None


class EdgeTables:
    """Reshard tables, each distinct one once."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.tables: list[IntArray] = []
        self._known: dict[Hashable, int] = {}

    def matrix(
        self, source: Sequence[Layout], target: Sequence[Layout], dims: Dims, kind: TensorType, price: PriceKind
    ) -> IntArray:
        """[len(source), len(target)] ns of resharding."""
        rows, row_of = _unique(source)
        columns, column_of = _unique(target)
        return self.prices.reshard_table(rows, columns, dims, kind, price)[np.ix_(row_of, column_of)]

    def joint_matrix(
        self, source: Sequence[Layout], wanted: Sequence[Sequence[Layout]], dims: Dims, kind: TensorType,
        price: PriceKind,
    ) -> IntArray:
        """[maker's states, reader's states] ns; ``wanted[i]``: the layouts the reader's states want for the i-th
        operand that the value is."""
        total = self.matrix(source, wanted[0], dims, kind, price)
        for i in range(1, len(wanted)):
            fresh = np.array([all(earlier[s] != layout for earlier in wanted[:i])
                              for s, layout in enumerate(wanted[i])], np.int64)
            total = total + fresh * self.matrix(source, wanted[i], dims, kind, price)
        return total

    def add(self, table: IntArray) -> int:
        """Index of a table made elsewhere."""
        key = (table.shape, table.tobytes())
        if key not in self._known:
            self._known[key] = len(self.tables)
            self.tables.append(table)
        return self._known[key]

    def table(
        self, source: Sequence[Layout], wanted: tuple[tuple[Layout, ...], ...], dims: Dims, kind: TensorType,
        flags: EdgeFlags,
    ) -> int:
        """Index of the table in ``tables``."""
        key = (tuple(source), wanted, dims, kind.dtype, flags)
        if key not in self._known:
            self._known[key] = len(self.tables)
            matrix = self.joint_matrix(source, wanted, dims, kind, flags.price)
            if flags.keep_sums:
                for target in wanted:
                    matrix = np.where(reduces(source, target), FORBIDDEN, matrix)
            if flags.pair is not None:
                matrix = flags.pair.apply(matrix, moved(source, wanted[0]))
            self.tables.append(matrix)
        return self._known[key]


def moved(source: Sequence[Layout], target: Sequence[Layout]) -> BoolArray:
    """[len(source), len(target)]: the layouts differ."""
    number: dict[Layout, int] = {}
    return np.array([number.setdefault(lay, len(number)) for lay in source])[:, None] != np.array(
        [number.setdefault(lay, len(number)) for lay in target])[None, :]


def reduces(source: Sequence[Layout], target: Sequence[Layout]) -> BoolArray:
    """[len(source), len(target)]: a pending sum of the source is not left as it is."""
    number: dict[Placement, int] = {}
    ours, theirs = (np.array([[number.setdefault(p, len(number)) for p in lay] for lay in layouts], np.int64)
                    for layouts in (source, target))
    pending = np.array([[isinstance(p, Partial) for p in lay] for lay in source])
    return np.asarray((pending[:, None, :] & (ours[:, None, :] != theirs[None, :, :])).any(axis=2))


def _unique(layouts: Sequence[Layout]) -> tuple[tuple[Layout, ...], list[int]]:
    table: dict[Layout, int] = {}
    index = [table.setdefault(lay, len(table)) for lay in layouts]
    return tuple(table), index
