"""Pushing a cost vector through a pair table: out[j] = min_i (a[i] + table[i, j]), the inner step of message passing.

Tables made from layouts repeat rows and columns many times over; equal ones are computed once.
"""

from __future__ import annotations

import numpy as np

from fxpar.solver.problem import IntArray

#: Below this many entries looking for equal rows costs more than it saves.
SMALL_TABLE = 600


def equal_rows(table: IntArray) -> tuple[IntArray, IntArray]:
    """(the first row of every kind, in order, and the kind of each row): what numpy.unique sorts for, by hashing."""
    kinds: dict[bytes, int] = {}
    first: list[int] = []
    kind_of = np.empty(len(table), dtype=np.int64)
    for row, values in enumerate(np.ascontiguousarray(table)):
        kind = kinds.setdefault(values.tobytes(), len(first))
        if kind == len(first):
            first.append(row)
        kind_of[row] = kind
    return np.array(first, dtype=np.int64), kind_of


def core_of(table: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """(table without repeated rows and columns, the place in it of every row, and of every column)."""
    rows, row_of = equal_rows(table)
    columns, column_of = equal_rows(table[rows].T)
    return np.ascontiguousarray(table[np.ix_(rows, columns)]), row_of, column_of


def both_directions(table: IntArray) -> tuple[MinPlus, MinPlus]:
    """The pushes from rows to columns and from columns to rows."""
    if table.size < SMALL_TABLE:
        return MinPlus(table), MinPlus(table.T)
    core, row_of, column_of = core_of(table)
    if 2 * core.size > table.size:
        return MinPlus(table), MinPlus(table.T)
    return MinPlus(core, row_of, column_of), MinPlus(core.T, column_of, row_of)


class MinPlus:
    """One direction of one table, [inputs, outputs]; of its core where rows and columns repeat (see `core_of`)."""

    def __init__(self, core: IntArray, row_of: IntArray | None = None, column_of: IntArray | None = None) -> None:
        self.core = np.ascontiguousarray(core)
        self.column_of = column_of
        self.row_order: IntArray | None = None
        self.row_starts: IntArray | None = None
        if row_of is not None:
            self.row_order = np.argsort(row_of, kind="stable")
            self.row_starts = np.searchsorted(row_of[self.row_order], np.arange(len(core)))

    def push(self, a: IntArray) -> IntArray:
        """The vector out[j] = min_i (a[i] + table[i, j])."""
        if self.column_of is None:
            return np.minimum.reduce(self.core + a[:, None], axis=0)
        assert self.row_order is not None and self.row_starts is not None
        least = np.minimum.reduceat(a[self.row_order], self.row_starts)
        return np.minimum.reduce(self.core + least[:, None], axis=0)[self.column_of]
