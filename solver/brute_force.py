"""The exact optimum by enumeration: the yardstick of the tests, for problems of a few thousand assignments."""

from fractions import Fraction
from itertools import product

from fxpar.solver.problem import Problem
from fxpar.solver.solution import Solution, Status


def brute_force(problem: Problem) -> Solution:
    """The lexicographically smallest of the cheapest feasible assignments, by trying every assignment."""
    problem.validate()
    best: tuple[int, tuple[int, ...]] | None = None
    smallest_memory: int | None = None
    for assignment in product(*(range(variable.states) for variable in problem.variables)):
        cost = problem.cost(assignment)
        if cost is None:
            continue
        memory = problem.memory(assignment)
        if smallest_memory is None or memory < smallest_memory:
            smallest_memory = memory
        if (problem.budget is None or memory <= problem.budget) and (best is None or cost < best[0]):
            best = (cost, assignment)
    if best is None:
        return Solution(Status.INFEASIBLE, None, None, 0, None, None, Fraction(0), smallest_memory)
    cost, assignment = best
    return Solution(Status.OPTIMAL, assignment, cost, cost, problem.memory(assignment), 0.0, Fraction(0), None)
