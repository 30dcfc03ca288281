import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxpar.solver.dual
import fxpar.solver.solve
from fxpar.solver.brute_force import brute_force
from fxpar.solver.problem import FORBIDDEN, Edge, Problem, Variable
from fxpar.solver.random_assignment import random_assignment
from fxpar.solver.solution import Status
from fxpar.solver.solve import solve
from tests.solver.draw import problems
from tests.solver.layered import layered


@given(problems())
def test_small_problems_are_solved_exactly(problem):
    exact, found = brute_force(problem), solve(problem, gap=0.0)
    assert found.status is exact.status
    if exact.status is Status.INFEASIBLE:
        assert found.assignment is None and (problem.budget is None or found.min_memory == exact.min_memory)
    else:
        assert found.cost == found.bound == exact.cost == problem.cost(found.assignment)
        assert found.memory == problem.memory(found.assignment) and problem.feasible(found.assignment)
        assert found.gap == 0.0


@given(problems(), st.booleans())
def test_bounds_hold_without_the_exact_engines(problem, narrow):
    """What message passing, decoding and pooling do alone, as on problems too large to settle."""
    exact = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fxpar.solver.solve, "SETTLE_SIZE", -1)
        if not narrow:
            patch.setattr(fxpar.solver.dual, "eliminate", lambda graph: None)
        found = solve(problem, gap=0.0)
    if exact.status is Status.INFEASIBLE:
        assert found.status is Status.INFEASIBLE
    else:
        assert found.bound <= exact.cost <= found.cost == problem.cost(found.assignment)
        assert problem.feasible(found.assignment)


@given(problems(most_variables=8), st.lists(st.integers(0, 2**31), min_size=1, max_size=4), st.sampled_from([0.0, 0.5]))
def test_candidates_are_never_beaten_by_the_result(problem, seeds, gap):
    try:
        candidates = [random_assignment(problem, seed) for seed in seeds]
    except ValueError:
        assert solve(problem).status is Status.INFEASIBLE
        return
    found = solve(problem, gap=gap, candidates=candidates)
    feasible = [problem.cost(each) for each in candidates if problem.feasible(each)]
    assert not feasible or found.cost <= min(feasible)
    assert found.status in (Status.OPTIMAL, Status.INFEASIBLE) or found.gap <= gap


def test_a_coloring_that_arcs_cannot_refute_is_infeasible():
    """Three mutually different variables of two states, linked to a long chain."""
    rows = np.zeros(2, dtype=np.int64)
    differ = np.array([[FORBIDDEN, 1], [1, FORBIDDEN]], dtype=np.int64)
    variables = tuple(Variable(f"v{i}", rows, rows) for i in range(60))
    chain = tuple(Edge(i, i + 1, 0) for i in range(59))
    assert solve(Problem(variables, chain, (differ,), 0)).status is Status.OPTIMAL
    for budget in (None, 0):
        assert solve(Problem(variables, (*chain, Edge(0, 2, 0)), (differ,), budget)).status is Status.INFEASIBLE


def test_an_empty_problem_and_bad_candidates():
    empty = Problem((), (), (), None)
    assert solve(empty).assignment == () and solve(empty).status is Status.OPTIMAL
    one = Problem((Variable("a", np.array([3, 2]), np.array([0, 0])),), (), (), None)
    with pytest.raises(ValueError, match="assignment has 2"):
        solve(one, candidates=[(0, 0)])
    with pytest.raises(ValueError, match="state 2 of variable a"):
        solve(one, candidates=[(2,)])


def test_an_infeasible_budget_reports_the_least_memory():
    problem = layered(3, axes=1, budget=1)
    found = solve(problem)
    assert found.status is Status.INFEASIBLE and found.min_memory is not None
    fitting = solve(replace(problem, budget=found.min_memory))
    assert fitting.assignment is not None and fitting.memory == found.min_memory


def test_less_memory_never_costs_less():
    problem = layered(3, axes=1)
    free = solve(problem)
    assert free.status is Status.OPTIMAL
    least = solve(replace(problem, budget=0)).min_memory
    previous = free
    for share in (0.7, 0.4, 0.1):
        found = solve(replace(problem, budget=least + int(share * (free.memory - least))), gap=0.0)
        assert found.bound >= previous.bound * 0.999 and found.cost >= free.cost
        assert found.gap <= 0.02 and found.multiplier >= 0
        previous = found


@pytest.mark.parametrize(("blocks", "axes", "share"), [(20, 2, None), (20, 2, 0.85), (3, 3, 0.9)])
def test_large_layered_graphs_are_solved_within_the_gap(blocks, axes, share):
    problem = layered(blocks, axes=axes)
    lines = []
    found = solve(problem, progress=lines.append)
    if share is not None:
        problem = replace(problem, budget=int(found.memory * share))
        found = solve(problem)
        assert found.memory <= problem.budget
    assert lines and found.gap <= 0.01 and found.bound <= found.cost == problem.cost(found.assignment)


def test_effort_zero_still_answers():
    found = solve(layered(3, axes=2), effort=0)
    assert found.assignment is not None


SOLVE_IN_A_FRESH_PROCESS = """
from dataclasses import replace
from fxpar.solver.solve import solve
from tests.solver.layered import layered
problem = layered(6, axes=2)
problem = replace(problem, budget=int(solve(problem).memory * 0.85))
found = solve(problem)
print(found.cost, found.bound, found.multiplier, found.assignment)
"""


def test_every_process_gives_the_same_solution(repository):
    printed = {
        subprocess.run(
            [sys.executable, "-c", SOLVE_IN_A_FRESH_PROCESS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1 and printed.pop().strip()
