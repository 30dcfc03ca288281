"""Pushing a cost vector through a pair table: out[j] = min_i (a[i] + table[i, j]), the inner step of message passing.

Tables made from layouts repeat rows and columns many times over; equal ones are computed once.
"""

import numpy as np

from fxpar.solver.problem import IntArray

#: Below this many entries looking for equal rows costs more than it saves.
SMALL_TABLE = 600


class MinPlus:
    """One direction of one table, [inputs, outputs]."""

    def __init__(self, table: IntArray) -> None:
        self.core = np.ascontiguousarray(table)
        self.row_order: IntArray | None = None
        self.row_starts: IntArray | None = None
        self.column_of: IntArray | None = None
        if table.size < SMALL_TABLE:
            return
        rows, row_of = np.unique(table, axis=0, return_inverse=True)
        core, column_of = np.unique(rows, axis=1, return_inverse=True)
        if 2 * core.size > table.size:
            return
        row_of = row_of.reshape(-1)
        self.core = np.ascontiguousarray(core)
        self.row_order = np.argsort(row_of, kind="stable")
        self.row_starts = np.searchsorted(row_of[self.row_order], np.arange(len(core)))
        self.column_of = column_of.reshape(-1)

    def push(self, a: IntArray) -> IntArray:
        """The vector out[j] = min_i (a[i] + table[i, j])."""
        if self.column_of is None:
            return np.minimum.reduce(self.core + a[:, None], axis=0)
        assert self.row_order is not None and self.row_starts is not None
        least = np.minimum.reduceat(a[self.row_order], self.row_starts)
        return np.minimum.reduce(self.core + least[:, None], axis=0)[self.column_of]
