"""The exact solution of a small graph with its memory row, by OR-Tools CP-SAT.

One Boolean per state, one per pair of distinguishable states of a link, tied by sums (the local polytope, whose linear
relaxation is almost integral on these problems). One worker and a deterministic limit: the same graph always gives the
same choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from fxpar.solver.graph import BLOCKED, Graph, IntArray
from fxpar.solver.min_plus import core_of


@dataclass(frozen=True)
class Residue:
    """`choice`: positions, or None. `bound`: ns, valid for this graph. `settled`: the answer is proven, either way."""

    choice: list[int] | None
    bound: int | None
    settled: bool


def residue_size(graph: Graph) -> int:
    """Booleans that `solve_residue` would make, about: the measure of what is small."""
    sizes = [distinct_sizes(table) for table in graph.tables]
    return sum(len(costs) for costs in graph.costs if len(costs) > 1) + sum(
        sizes[link.table][0] * sizes[link.table][1] for link in graph.links
    )


def distinct_sizes(table: IntArray) -> tuple[int, int]:
    """How many distinct rows and columns a table has."""
    rows, columns = core_of(table)[0].shape
    return rows, columns


def solve_residue(graph: Graph, hint: Sequence[int] | None, limit: float, costed: bool = True) -> Residue:
    """The cheapest choice of positions within the budget.

    hint: a choice to start from (it need not be feasible). limit: deterministic time, about seconds.
    costed: False looks for any feasible choice instead.
    """
    model = cp_model.CpModel()
    states = [_state_literals(model, len(costs)) for costs in graph.costs]
    terms: list[cp_model.LinearExprT] = []
    weights: list[int] = []
    for v, literals in enumerate(states):
        if len(literals) > 1 and costed:
            terms += literals
            weights += graph.costs[v].tolist()
    groups = _Groups(model, states)
    for link in graph.links:
        _add_link(model, graph, link.u, link.v, link.table, groups, terms, weights, costed)
    if graph.budget is not None:
        _add_memory_row(model, graph, states)
    if hint is not None:
        for v, literals in enumerate(states):
            for state, literal in enumerate(literals):
                if len(literals) > 1:
                    model.add_hint(literal, state == hint[v])
    if costed:
        model.minimize(cp_model.LinearExpr.weighted_sum(terms, weights))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = limit
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Residue(None, None, True)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Residue(None, None, False)
    choice = [next(state for state, each in enumerate(literals) if solver.boolean_value(each)) for literals in states]
    if not costed:
        return Residue(choice, None, False)
    if status == cp_model.OPTIMAL:
        return Residue(choice, graph.cost(choice), True)
    # The library reports its bound as a float: step back further than rounding can have carried it.
    reported = solver.best_objective_bound
    return Residue(choice, graph.constant + math.floor(reported - abs(reported) * 1e-9) - 1, False)


def _state_literals(model: cp_model.CpModel, count: int) -> list[cp_model.IntVar]:
    literals = [model.new_bool_var("") for _ in range(count)]
    model.add_exactly_one(literals)
    return literals


class _Groups:
    """Literals that say "one of these states", made once per variable and group."""

    def __init__(self, model: cp_model.CpModel, states: list[list[cp_model.IntVar]]) -> None:
        self.model = model
        self.states = states
        self.known: dict[tuple[int, tuple[int, ...]], cp_model.IntVar] = {}

    def literals(self, v: int, group_of: IntArray) -> list[cp_model.IntVar]:
        """One literal per group number in `group_of` [states of v]."""
        members = [np.flatnonzero(group_of == group).tolist() for group in range(int(group_of.max()) + 1)]
        return [self._literal(v, tuple(each)) for each in members]

    def _literal(self, v: int, members: tuple[int, ...]) -> cp_model.IntVar:
        if len(members) == 1:
            return self.states[v][members[0]]
        key = (v, members)
        if key not in self.known:
            literal = self.model.new_bool_var("")
            self.model.add(sum(self.states[v][i] for i in members) == literal)
            self.known[key] = literal
        return self.known[key]


def _add_link(
    model: cp_model.CpModel,
    graph: Graph,
    u: int,
    v: int,
    table: int,
    groups: _Groups,
    terms: list[cp_model.LinearExprT],
    weights: list[int],
    costed: bool,
) -> None:
    core, row_of, column_of = core_of(graph.tables[table])
    at_u = groups.literals(u, row_of)
    at_v = groups.literals(v, column_of)
    if not costed or bool((core[core < BLOCKED] == 0).all()):
        if (core >= BLOCKED).any():
            for i, literal in enumerate(at_u):
                model.add_bool_or([at_v[j] for j in np.flatnonzero(core[i] < BLOCKED)]).only_enforce_if(literal)
        return
    by_row: list[list[cp_model.IntVar]] = [[] for _ in at_u]
    by_column: list[list[cp_model.IntVar]] = [[] for _ in at_v]
    for i in range(len(at_u)):
        for j in range(len(at_v)):
            if core[i, j] < BLOCKED:
                pair = model.new_bool_var("")
                by_row[i].append(pair)
                by_column[j].append(pair)
                if core[i, j]:
                    terms.append(pair)
                    weights.append(int(core[i, j]))
    for literal, pairs in zip(at_u + at_v, by_row + by_column, strict=True):
        model.add(sum(pairs) == literal)


def _add_memory_row(model: cp_model.CpModel, graph: Graph, states: list[list[cp_model.IntVar]]) -> None:
    assert graph.budget is not None
    room = graph.budget
    literals: list[cp_model.LinearExprT] = []
    weights: list[int] = []
    for v, own in enumerate(states):
        least = int(graph.memory[v].min())
        room -= least
        for state, literal in enumerate(own):
            extra = int(graph.memory[v][state]) - least
            if extra:
                literals.append(literal)
                weights.append(extra)
    model.add(cp_model.LinearExpr.weighted_sum(literals, weights) <= room)
