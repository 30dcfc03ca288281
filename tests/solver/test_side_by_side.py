"""Threads change no result: neither the order nor a number, and errors come through."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.solver import side_by_side as threads
from fxpar.solver.bound import scale
from fxpar.solver.graph import merge
from fxpar.solver.problem import FORBIDDEN, largest_finite
from fxpar.solver.side_by_side import side_by_side
from fxpar.solver.solve import solve
from tests.solver.draw import problems


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(threads, "LARGE", 0)
    monkeypatch.setattr(threads, "_cores", lambda: 4)


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_are_those_of_a_loop(many, count):
    assert side_by_side(lambda n: n * n, list(range(count)), 1) == [n * n for n in range(count)]


def test_errors_come_through(many):
    def work(n):
        if n == 3:
            raise ValueError("three")
        return n

    with pytest.raises(ValueError, match="three"):
        side_by_side(work, list(range(8)), 1)


@given(problems())
def test_graphs_and_solutions_do_not_depend_on_threads(problem):
    alone, solution = scale(merge(problem)), solve(problem)
    large, cores = threads.LARGE, threads._cores
    threads.LARGE, threads._cores = 0, lambda: 4
    try:
        beside, again = scale(merge(problem)), solve(problem)
    finally:
        threads.LARGE, threads._cores = large, cores
    assert alone.shift == beside.shift and alone.graph.links == beside.graph.links
    assert all(np.array_equal(a, b) for a, b in zip(alone.tables, beside.tables, strict=True))
    assert (solution.assignment, solution.cost, solution.bound) == (again.assignment, again.cost, again.bound)


@given(st.lists(st.integers(-(2**40), 2**40) | st.integers(FORBIDDEN, 2**63 - 1), max_size=12))
def test_the_largest_finite_entry(values):
    finite = [abs(v) for v in values if v < FORBIDDEN]
    assert largest_finite(np.array(values, dtype=np.int64)) == max(finite, default=0)
