"""A Problem made ready for computing: one link per pair of variables, forbidden entries as one finite large number.

`merge` folds weights into tables and parallel edges into one link. `restrict` keeps some states of every variable and
folds away the links that became trivial. Both intern equal tables, because a model has thousands of links and only
hundreds of distinct tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fxpar.solver.problem import FORBIDDEN, IntArray, Problem
from fxpar.solver.side_by_side import side_by_side

BoolArray = NDArray[np.bool_]

#: Stands for FORBIDDEN inside sums: larger than any honest total, small enough that a dozen of them do not overflow.
BIG: int = 2**57

#: A sum at or above this contains a BIG; honest totals stay below it.
BLOCKED: int = 2**56


@dataclass(frozen=True)
class Link:
    """The pair cost of variables `u < v`: `tables[table]` of shape [states of u, states of v]."""

    u: int
    v: int
    table: int


@dataclass(frozen=True, eq=False)
class Graph:
    """Per variable costs and memory, links with `u < v` and no duplicates, tables with BIG for forbidden.

    `states[v]` are the state numbers of the Problem that the entries of `costs[v]` stand for.
    `links_of[v]` are the positions of the links that touch v, in order. `constant`: ns that every assignment pays.
    `moved[u, v]`: what the pair costs beyond its link's table, a term per state of u and one per state of v, already in
    `costs` (pairs without a link among them).
    """

    states: tuple[IntArray, ...]
    costs: tuple[IntArray, ...]
    memory: tuple[IntArray, ...]
    links: tuple[Link, ...]
    tables: tuple[IntArray, ...]
    links_of: tuple[tuple[int, ...], ...]
    budget: int | None
    constant: int
    moved: Mapping[tuple[int, int], tuple[IntArray, IntArray]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.costs)

    def cost(self, choice: Sequence[int]) -> int:
        """Total cost in ns of positions (not Problem states), at least BLOCKED if something chosen is forbidden."""
        total = self.constant + sum(int(costs[i]) for costs, i in zip(self.costs, choice, strict=True))
        return total + sum(int(self.tables[link.table][choice[link.u], choice[link.v]]) for link in self.links)

    def weight(self, choice: Sequence[int]) -> int:
        """Total memory in memory units."""
        return sum(int(memory[i]) for memory, i in zip(self.memory, choice, strict=True))

    def original(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The Problem states of a choice of positions."""
        return tuple(int(states[i]) for states, i in zip(self.states, choice, strict=True))

    def positions(self, assignment: Sequence[int]) -> list[int] | None:
        """The positions of Problem states, or None where a state is not kept."""
        found = []
        for states, state in zip(self.states, assignment, strict=True):
            place = int(np.searchsorted(states, state))
            if place == len(states) or states[place] != state:
                return None
            found.append(place)
        return found


def merge(problem: Problem) -> Graph:
    """The Graph of a validated Problem, with all its states."""
    parts: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
    for edge in problem.edges:
        flipped = edge.u > edge.v
        ends = (edge.v, edge.u) if flipped else (edge.u, edge.v)
        parts.setdefault(ends, []).append((edge.table, edge.weight, flipped))
    place: dict[tuple[tuple[int, int, bool], ...], int] = {}
    links = []
    for u, v in sorted(parts):
        key = tuple(sorted(parts[u, v]))
        links.append(Link(u, v, place.setdefault(key, len(place))))
    entries = sum(problem.tables[table].size for key in place for table, _, _ in key)
    tables = side_by_side(partial(_sum_of_tables, problem), list(place), entries)
    count = len(problem.variables)
    return Graph(
        states=tuple(np.arange(variable.states, dtype=np.int64) for variable in problem.variables),
        costs=tuple(np.where(variable.costs >= FORBIDDEN, BIG, variable.costs) for variable in problem.variables),
        memory=tuple(variable.memory for variable in problem.variables),
        links=tuple(links),
        tables=tuple(tables),
        links_of=touching(count, links),
        budget=problem.budget,
        constant=0,
    )


def touching(count: int, links: Sequence[Link]) -> tuple[tuple[int, ...], ...]:
    """For each of `count` variables the positions of the links that touch it, in order."""
    around: list[list[int]] = [[] for _ in range(count)]
    for position, link in enumerate(links):
        around[link.u].append(position)
        around[link.v].append(position)
    return tuple(tuple(each) for each in around)


def restrict(graph: Graph, live: Sequence[BoolArray]) -> Graph:
    """The Graph with only the `live` states; `live` must be arc consistent (see `arcs.arc_consistent`).

    A link with a decided end, or whose cost is a sum of one term per end, moves into the costs of its ends.
    """
    kept = [np.flatnonzero(mask) for mask in live]
    costs = [graph.costs[v][kept[v]] for v in range(graph.size)]
    mask_numbers: dict[bytes, int] = {}
    number = [
        mask_numbers.setdefault(np.packbits(mask).tobytes() + bytes([len(mask) % 8]), len(mask_numbers))
        for mask in live
    ]
    wanted: dict[tuple[int, int, int], tuple[IntArray, IntArray, IntArray]] = {}
    for link in graph.links:
        key = (link.table, number[link.u], number[link.v])
        wanted.setdefault(key, (graph.tables[link.table], kept[link.u], kept[link.v]))
    parts = side_by_side(_split_of, list(wanted.values()), sum(table.size for table, _, _ in wanted.values()))
    tables: list[IntArray] = []
    pieces: dict[tuple[int, int, int], tuple[int, IntArray, IntArray]] = {}
    for key, (rows, columns, rest) in zip(wanted, parts, strict=True):
        pieces[key] = (-1 if rest is None else len(tables), rows, columns)
        if rest is not None:
            tables.append(rest)
    links = []
    moved = {(u, v): (rows[kept[u]], columns[kept[v]]) for (u, v), (rows, columns) in graph.moved.items()}
    for link in graph.links:
        place, rows, columns = pieces[link.table, number[link.u], number[link.v]]
        if place >= 0:
            links.append(Link(link.u, link.v, place))
        costs[link.u] = costs[link.u] + rows
        costs[link.v] = costs[link.v] + columns
        before = moved.get((link.u, link.v))
        moved[link.u, link.v] = (rows, columns) if before is None else (before[0] + rows, before[1] + columns)
    constant = graph.constant
    for v in range(graph.size):
        least = int(costs[v].min())
        constant += least
        costs[v] = costs[v] - least
    return Graph(
        states=tuple(graph.states[v][kept[v]] for v in range(graph.size)),
        costs=tuple(costs),
        memory=tuple(graph.memory[v][kept[v]] for v in range(graph.size)),
        links=tuple(links),
        tables=tuple(tables),
        links_of=touching(graph.size, links),
        budget=graph.budget,
        constant=constant,
        moved=moved,
    )


def with_memory(graph: Graph, problem: Problem) -> Graph:
    """The Graph of a Problem that differs in memory and budget alone."""
    memory = tuple(variable.memory[states] for variable, states in zip(problem.variables, graph.states, strict=True))
    return replace(graph, memory=memory, budget=problem.budget)


def split(table: IntArray) -> tuple[IntArray, IntArray, IntArray | None]:
    """`table[i, j] == rows[i] + columns[j] + rest[i, j]`, with the row and column minima moved out; rest None if zero.

    Every row and column of `table` must hold an entry that is not BIG; BIG entries stay BIG in `rest`.
    """
    rows = table.min(axis=1)
    rest = np.subtract(table, rows[:, None], order="C")
    columns = rest.min(axis=0)
    rest -= columns
    forbidden = table >= BLOCKED
    if not forbidden.any() and not rest.any():
        return rows, columns, None
    rest[forbidden] = BIG
    return rows, columns, rest


def _split_of(wanted: tuple[IntArray, IntArray, IntArray]) -> tuple[IntArray, IntArray, IntArray | None]:
    """`split` of some rows and columns of a table."""
    table, rows, columns = wanted
    if len(rows) < len(table):
        table = table[rows]
    return split(table if len(columns) == table.shape[1] else table.take(columns, axis=1))


def _sum_of_tables(problem: Problem, key: tuple[tuple[int, int, bool], ...]) -> IntArray:
    first = problem.tables[key[0][0]]
    if len(key) == 1 and key[0][1:] == (1, False) and int(first.max()) < FORBIDDEN:
        return first
    total: IntArray | None = None
    forbidden: BoolArray | None = None
    for table, weight, flipped in key:
        values = problem.tables[table].T if flipped else problem.tables[table]
        blocked = values >= FORBIDDEN
        # what a forbidden entry becomes here, wrapped around or not, is written over below
        if total is None or forbidden is None:
            total, forbidden = np.multiply(values, weight, order="C"), blocked
        else:
            total += values if weight == 1 else values * weight
            forbidden |= blocked
    assert total is not None and forbidden is not None
    np.copyto(total, BIG, where=forbidden)
    return total
