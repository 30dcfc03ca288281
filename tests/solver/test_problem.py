import numpy as np
import pytest

from fxpar.solver.problem import FORBIDDEN, Edge, Problem, Variable


def ints(*values):
    return np.array(values, dtype=np.int64)


def two(table, **changes):
    variables = (Variable("a", ints(1, 2), ints(3, 0)), Variable("b", ints(10, 20), ints(0, 5)))
    fields = {"variables": variables, "edges": (Edge(1, 0, 0, 2),), "tables": (table,), "budget": 4, **changes}
    return Problem(**fields)


def test_costs_memory_and_budget_are_counted():
    problem = two(np.array([[100, 200], [FORBIDDEN, 400]], dtype=np.int64))
    problem.validate()
    assert problem.cost((0, 0)) == 1 + 10 + 2 * 100 and problem.cost((1, 1)) == 2 + 20 + 2 * 400
    assert problem.cost((0, 1)) is None and not problem.feasible((0, 1))
    assert problem.memory((0, 1)) == 8
    assert problem.feasible((0, 0)) and not problem.feasible((1, 1))


@pytest.mark.parametrize("assignment", [(0,), (0, 0, 0), (0, 2), (-1, 0)])
def test_assignments_that_do_not_belong_are_refused(assignment):
    with pytest.raises(ValueError, match="assignment has|is not in"):
        two(np.zeros((2, 2), dtype=np.int64)).cost(assignment)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"edges": (Edge(0, 0, 0),)}, "joins 0 and 0"),
        ({"edges": (Edge(0, 2, 0),)}, "joins 0 and 2 among 2"),
        ({"edges": (Edge(0, 1, 1),)}, "names table 1 among 1"),
        ({"edges": (Edge(0, 1, 0, 0),)}, "weight 0"),
        ({"tables": (np.zeros((2, 3), dtype=np.int64),)}, r"table 0 is \(2, 3\)"),
        ({"tables": (np.zeros((2, 2)),)}, "not a 2-D int64"),
        ({"variables": (Variable("a", ints(), ints()),), "edges": ()}, "a has no states"),
        ({"variables": (Variable("a", ints(1), ints(1, 2)),), "edges": ()}, "1 costs and 2 memories"),
        ({"variables": (Variable("a", ints(1), ints(-1)),), "edges": ()}, "negative memory"),
        ({"variables": (Variable("a", ints(2**60), ints(1)),), "edges": ()}, "add up to"),
        ({"variables": (Variable("a", np.zeros(1), ints(1)),), "edges": ()}, "not a 1-D int64"),
    ],
)
def test_malformed_problems_are_named(changes, fault):
    with pytest.raises(ValueError, match=fault):
        two(np.zeros((2, 2), dtype=np.int64), **changes).validate()
