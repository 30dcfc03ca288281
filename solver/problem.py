"""A placement problem as plain numbers: pick one state per variable, pay per state and per pair, stay under a budget.

    minimise    sum_v costs_v[x_v]  +  sum_e weight_e * tables[table_e][x_u, x_v]
    subject to  sum_v memory_v[x_v] <= budget            (when a budget is given)
                no chosen state and no chosen pair is FORBIDDEN

Costs are int64 nanoseconds, memory is int64 units of the caller's; both already multiplied by how often a class of tied
variables occurs. Nothing in this package knows what a variable stands for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxpar.solver.side_by_side import side_by_side

IntArray = NDArray[np.int64]

#: In a cost vector: this state may not be chosen. In a table: this pair may not be chosen. Larger values count too.
FORBIDDEN: int = int(np.iinfo(np.int64).max // 4)

#: The sum of the largest finite costs must stay below this, so that int64 sums of costs and messages never overflow.
LARGEST_TOTAL_COST: int = 2**53

#: The sum of the largest memories must stay below this (4 EiB in units of 64 KiB).
LARGEST_TOTAL_MEMORY: int = 2**46


@dataclass(frozen=True, eq=False)
class Variable:
    """One variable: `costs` [states] in ns and `memory` [states] in memory units, both int64."""

    name: str
    costs: IntArray
    memory: IntArray

    @property
    def states(self) -> int:
        return len(self.costs)


@dataclass(frozen=True)
class Edge:
    """A pair cost: `weight * tables[table][x_u, x_v]`, with `u != v` and `weight >= 1`. Parallel edges add up."""

    u: int
    v: int
    table: int
    weight: int = 1


@dataclass(frozen=True, eq=False)
class Problem:
    """Variables, pair costs over shared tables, and at most one memory row (`budget` in memory units, None: no row)."""

    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    tables: tuple[IntArray, ...]
    budget: int | None = None

    def cost(self, assignment: Sequence[int]) -> int | None:
        """Total cost in ns, or None if the assignment uses a FORBIDDEN state or pair. Counted in Python integers."""
        self._check_length(assignment)
        total = 0
        for variable, state in zip(self.variables, assignment, strict=True):
            own = int(variable.costs[state])
            if own >= FORBIDDEN:
                return None
            total += own
        for edge in self.edges:
            pair = int(self.tables[edge.table][assignment[edge.u], assignment[edge.v]])
            if pair >= FORBIDDEN:
                return None
            total += edge.weight * pair
        return total

    def memory(self, assignment: Sequence[int]) -> int:
        """Total memory in memory units."""
        self._check_length(assignment)
        return sum(int(variable.memory[state]) for variable, state in zip(self.variables, assignment, strict=True))

    def feasible(self, assignment: Sequence[int]) -> bool:
        """True if nothing chosen is FORBIDDEN and the memory row holds."""
        if self.cost(assignment) is None:
            return False
        return self.budget is None or self.memory(assignment) <= self.budget

    def validate(self) -> None:
        """Raises ValueError, listing every fault found, if shapes, indices, types or magnitudes are not as stated."""
        faults: list[str] = []
        for variable in self.variables:
            faults += _variable_faults(variable)
        for position, table in enumerate(self.tables):
            if table.ndim != 2 or table.dtype != np.int64:
                faults.append(f"table {position} is not a 2-D int64 array")
        if not faults:
            for position, edge in enumerate(self.edges):
                faults += self._edge_faults(position, edge)
        if not faults:
            faults = self._magnitude_faults()
        if faults:
            shown = "; ".join(faults[:10])
            more = f"; and {len(faults) - 10} more" if len(faults) > 10 else ""
            raise ValueError(f"malformed problem: {shown}{more}")

    def _check_length(self, assignment: Sequence[int]) -> None:
        if len(assignment) != len(self.variables):
            raise ValueError(f"assignment has {len(assignment)} states for {len(self.variables)} variables")
        for variable, state in zip(self.variables, assignment, strict=True):
            if not 0 <= state < variable.states:
                raise ValueError(f"state {state} of variable {variable.name} is not in 0..{variable.states - 1}")

    def _edge_faults(self, position: int, edge: Edge) -> list[str]:
        count = len(self.variables)
        if not (0 <= edge.u < count and 0 <= edge.v < count) or edge.u == edge.v:
            return [f"edge {position} joins {edge.u} and {edge.v} among {count} variables"]
        if not 0 <= edge.table < len(self.tables):
            return [f"edge {position} names table {edge.table} among {len(self.tables)}"]
        faults = []
        wanted = (self.variables[edge.u].states, self.variables[edge.v].states)
        if self.tables[edge.table].shape != wanted:
            faults.append(f"edge {position}: table {edge.table} is {self.tables[edge.table].shape}, not {wanted}")
        if edge.weight < 1:
            faults.append(f"edge {position} has weight {edge.weight}")
        return faults

    def _magnitude_faults(self) -> list[str]:
        faults = []
        largest_pair = side_by_side(largest_finite, self.tables, sum(table.size for table in self.tables))
        total = sum(largest_finite(variable.costs) for variable in self.variables)
        total += sum(edge.weight * largest_pair[edge.table] for edge in self.edges)
        if total >= LARGEST_TOTAL_COST:
            faults.append(f"the largest costs add up to {total} ns, the limit is {LARGEST_TOTAL_COST}")
        memory = sum(int(variable.memory.max()) for variable in self.variables)
        if memory >= LARGEST_TOTAL_MEMORY:
            faults.append(f"the largest memories add up to {memory} units, the limit is {LARGEST_TOTAL_MEMORY}")
        return faults


def largest_finite(values: IntArray) -> int:
    """The largest absolute value among the entries that are not FORBIDDEN (0 if there are none)."""
    if not values.size:
        return 0
    largest = int(values.max())
    if largest >= FORBIDDEN:
        largest = int(np.where(values < FORBIDDEN, values, 0).max())
    return max(largest, abs(min(int(values.min()), 0)))


def _variable_faults(variable: Variable) -> list[str]:
    faults = []
    for label, values in (("costs", variable.costs), ("memory", variable.memory)):
        if values.ndim != 1 or values.dtype != np.int64:
            faults.append(f"{label} of variable {variable.name} is not a 1-D int64 array")
    if faults:
        return faults
    if variable.states == 0:
        faults.append(f"variable {variable.name} has no states")
    elif len(variable.memory) != variable.states:
        faults.append(f"variable {variable.name} has {variable.states} costs and {len(variable.memory)} memories")
    elif int(variable.memory.min()) < 0:
        faults.append(f"variable {variable.name} has negative memory")
    return faults
