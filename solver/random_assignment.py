"""Assignments drawn at random among those without forbidden pairs: whatever a plan could be, for soundness tests."""

from dataclasses import replace
from random import Random

import numpy as np

from fxpar.solver.arcs import Arcs, all_states, arc_consistent
from fxpar.solver.graph import BLOCKED, BoolArray, Graph, IntArray, merge, restrict
from fxpar.solver.problem import Problem
from fxpar.solver.residue import solve_residue

#: Draws that run into a dead end, or over the budget, before the exact solver draws instead.
ATTEMPTS = 20
#: Deterministic time of the exact solver, about seconds.
LIMIT = 60.0
#: Random costs of the exact solver's draw.
COSTS = 1_000


def random_assignment(problem: Problem, seed: int, *, budget: int | None = None) -> tuple[int, ...]:
    """An assignment without forbidden states and pairs; the same seed gives the same one.

    Variables are taken in random order, each gets a random state among those that the earlier ones leave possible.
    budget: memory units the assignment must fit; None ignores memory, the problem's own budget too.
    Raises ValueError if there is no such assignment, or the exact solver's limit is reached before one is found.
    """
    problem.validate()
    random = Random(seed)
    graph = replace(merge(problem), budget=budget)
    arcs = Arcs(graph)
    live = arc_consistent(arcs, all_states(graph))
    if live is None:
        raise ValueError("no assignment avoids all forbidden states and pairs")
    for _ in range(ATTEMPTS):
        choice = _draw(arcs, live, random)
        if choice is not None and (budget is None or graph.weight(choice) <= budget):
            return tuple(choice)
    return _draw_exactly(restrict(graph, live), random)


def _draw(arcs: Arcs, live: list[BoolArray], random: Random) -> list[int] | None:
    """One pass over the variables; a state that leaves another variable empty is struck out. None at a dead end."""
    live = list(live)
    order = list(range(len(live)))
    random.shuffle(order)
    decided = [False] * len(live)
    choice = [0] * len(live)
    for v in order:
        while True:
            possible = np.flatnonzero(live[v]).tolist()
            if not possible:
                return None
            choice[v] = random.choice(possible)
            before = list(live)
            if arcs.assign(live, v, choice[v], decided):
                break
            decided[v] = False
            live = before
            mask = live[v].copy()
            mask[choice[v]] = False
            live[v] = mask
            if not mask.any() or arcs.propagate(live, [v], decided) is not None:
                return None
    return choice


def _draw_exactly(graph: Graph, random: Random) -> tuple[int, ...]:
    """The cheapest assignment for costs drawn at random."""
    costs = tuple(_random_costs(len(each), random) for each in graph.costs)
    tables = tuple(np.where(table >= BLOCKED, table, 0) for table in graph.tables)
    free = replace(graph, costs=costs, tables=tables)
    found = solve_residue(free, None, LIMIT)
    if found.choice is None:
        raise ValueError(
            "no assignment avoids all forbidden pairs and fits the budget"
            if found.settled
            else "found no assignment that avoids all forbidden pairs and fits the budget within the limit"
        )
    return graph.original(found.choice)


def _random_costs(count: int, random: Random) -> IntArray:
    return np.array([random.randrange(COSTS) for _ in range(count)], dtype=np.int64)
