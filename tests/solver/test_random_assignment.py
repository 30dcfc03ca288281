import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.solver.brute_force import brute_force
from fxpar.solver.problem import Problem
from fxpar.solver.random_assignment import random_assignment
from fxpar.solver.solution import Status
from tests.solver.draw import problems
from tests.solver.layered import layered


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(0, 2**31))
def test_drawn_assignments_avoid_forbidden_pairs_and_fit_a_given_budget(problem, seed):
    ignoring_memory = Problem(problem.variables, problem.edges, problem.tables, None)
    for wanted in (ignoring_memory, problem):
        if brute_force(wanted).status is Status.INFEASIBLE:
            with pytest.raises(ValueError, match="no assignment"):
                random_assignment(wanted, seed, budget=wanted.budget)
        else:
            assert wanted.feasible(random_assignment(wanted, seed, budget=wanted.budget))


def test_seeds_reach_many_assignments_of_a_layered_graph():
    problem = layered(3, axes=1)
    drawn = {random_assignment(problem, seed) for seed in range(12)}
    assert all(problem.cost(each) is not None for each in drawn)
    assert len(drawn) == 12 and random_assignment(problem, 3) == random_assignment(problem, 3)
