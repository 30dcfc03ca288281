"""The bound of any overlap: below the larger of compute and communication of every assignment."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.overlap import QUARTERS, CommunicationPrices, mixture, overlap_bound
from fxpar.priced_problem import formulate_again, formulate_question
from fxpar.solver.certificate import proven_bound
from fxpar.solver.problem import FORBIDDEN, Problem
from fxpar.solver.solve import solve
from tests.compiled import mlp_plan
from tests.solver.draw import problems


def parts(problem: Problem, seed: int) -> Problem:
    """Some of every cost, as its communication."""
    rng = np.random.default_rng(seed)

    def some(values):
        barred = values >= FORBIDDEN
        return np.where(barred, values, (np.where(barred, 0, values) * rng.random(values.shape)).astype(np.int64))

    return replace(
        problem, variables=tuple(replace(v, costs=some(v.costs)) for v in problem.variables),
        tables=tuple(some(t) for t in problem.tables),
    )


@settings(max_examples=40)
@given(problems(most_variables=5, most_states=3), st.integers(0, 2**31))
def test_no_assignment_is_below_it_however_it_overlaps(problem, seed):
    communication = parts(problem, seed)
    assignments = [a for a in product(*(range(v.states) for v in problem.variables)) if problem.feasible(a)]
    found = overlap_bound(problem, lambda: communication, solve(problem).multiplier)
    if not assignments:
        return
    quarters, proof, bound = found
    assert bound == proven_bound(mixture(problem, communication, quarters), proof)
    for a in assignments:
        sent = communication.cost(a)
        assert bound <= QUARTERS * max(problem.cost(a) - sent, sent)


def test_communication_and_compute_add_up_to_the_price():
    plan = mlp_plan("2x2")
    formulation, prices = formulate_again(plan)
    question = plan.certificate.question
    alone = CommunicationPrices(prices.cluster, prices.mesh)
    sent = formulate_question(plan.program, plan.decisions.mesh, alone, question, plan.decisions.recompute).problem
    whole = formulation.problem
    for both, part in zip(whole.tables, sent.tables, strict=True):
        assert (part <= both).all()
    assignment = formulation.assignment(plan.decisions)
    assert sent.cost(assignment) <= plan.prediction.communication_ns
    doubled = mixture(whole, sent, 2)
    assert doubled.cost(assignment) == 2 * whole.cost(assignment)
    with pytest.raises(ValueError, match="same pairs"):
        mixture(whole, replace(sent, edges=sent.edges[:-1]), 2)
