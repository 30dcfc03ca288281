"""Solutions of drawn problems against trying everything, and the proofs of their bounds.

`pytest tests/solver/test_certificate.py -m slow` draws 2,000 problems; the test without the mark draws 50.
"""

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.solver.brute_force import brute_force
from fxpar.solver.certificate import (
    LARGEST_PAYMENT,
    Proof,
    checkable_graph,
    distinct_columns,
    problem_digest,
    proven_bound,
)
from fxpar.solver.problem import Problem
from fxpar.solver.prove import prove
from fxpar.solver.solution import Status
from fxpar.solver.solve import solve
from tests.solver.draw import problems, staged_problems
from tests.solver.layered import layered


def holds(problem: Problem) -> None:
    """The solution is the optimum, its proof proves no more, and a claim of more is refuted by counting."""
    exact, found = brute_force(problem), solve(problem, gap=0.0)
    assert found.status is exact.status
    if exact.cost is None:
        return
    assert found.bound <= exact.cost
    if found.status is Status.OPTIMAL:
        assert found.cost == exact.cost
    proven = prove(problem, found.multiplier)
    assert proven is not None
    proof, bound = proven
    assert bound == proven_bound(problem, proof) <= exact.cost
    assert bound + 1 > proven_bound(problem, proof)
    cheaper = replace(problem, variables=(
        replace(problem.variables[0], costs=problem.variables[0].costs - 1), *problem.variables[1:]
    ))
    assert problem_digest(cheaper) != problem_digest(problem)


@given(problems() | staged_problems())
def test_solutions_and_proofs_of_drawn_problems(problem):
    holds(problem)


@pytest.mark.slow
@settings(max_examples=2000)
@given(problems() | staged_problems())
def test_solutions_and_proofs_of_two_thousand_problems(problem):
    holds(problem)


@given(
    problems() | staged_problems(), st.integers(0, 2**32 - 1), st.fractions(0, 1000, max_denominator=2**40),
    st.integers(1, 10**6),
)
def test_any_payments_at_any_price_prove_no_more_than_the_optimum(problem, seed, multiplier, quantum):
    graph, exact = checkable_graph(problem), brute_force(problem)
    if graph is None or exact.cost is None:
        return
    rng = np.random.default_rng(seed)
    kinds = [int(distinct_columns(graph.tables[link.table]).max()) + 1 for link in graph.links]
    payments = tuple(tuple(rng.integers(0, 10**4, count).tolist()) for count in kinds)
    assert proven_bound(problem, Proof(multiplier, quantum, payments)) <= exact.cost


@given(problems(budgets=False, barred=False))
def test_trees_are_proven_to_the_optimum(problem):
    """Message passing is exact without cycles, so all that is lost is rounding."""
    parents = {}
    for edge in problem.edges:
        parents.setdefault(max(edge.u, edge.v), (min(edge.u, edge.v), edge))
    tree = replace(problem, edges=tuple(edge for _, edge in parents.values()))
    exact, (proof, bound) = brute_force(tree), prove(tree, Fraction(0))
    assert exact.cost - len(tree.edges) * (proof.quantum + 2) - exact.cost // 10_000 <= bound <= exact.cost


def test_a_large_graph_is_proven_to_what_solving_says():
    problem = layered(6, axes=2)
    problem = replace(problem, budget=int(solve(problem).memory * 0.85))
    found = solve(problem)
    proof, bound = prove(problem, found.multiplier)
    assert found.multiplier > 0 and proof.multiplier == found.multiplier
    assert found.bound - found.cost // 500 <= bound <= found.cost


def test_proofs_of_other_problems_and_numbers_out_of_range_are_refused():
    problem = layered(3, axes=1, budget=10**6)
    proof, _ = prove(problem, Fraction(1, 3))
    first = proof.payments[0]
    for wrong, said in (
        (replace(proof, payments=proof.payments[1:]), "linked pairs"),
        (replace(proof, payments=((*first, 0), *proof.payments[1:])), "kinds of states"),
        (replace(proof, payments=((-1, *first[1:]), *proof.payments[1:])), "out of range"),
        (replace(proof, payments=((LARGEST_PAYMENT, *first[1:]), *proof.payments[1:])), "out of range"),
        (replace(proof, quantum=0), "quantum 0"),
        (replace(proof, multiplier=Fraction(-1)), "multiplier -1"),
        (replace(proof, multiplier=Fraction(2**62)), "too large"),
    ):
        with pytest.raises(ValueError, match=said):
            proven_bound(problem, wrong)


def test_nothing_is_proven_where_nothing_is_possible():
    from fxpar.solver.problem import FORBIDDEN, Edge, Variable

    barred = np.full((2, 2), FORBIDDEN)
    pair = tuple(Variable(n, np.zeros(2, np.int64), np.zeros(2, np.int64)) for n in "ab")
    problem = Problem(pair, (Edge(0, 1, 0),), (barred,), None)
    assert prove(problem, Fraction(0)) is None
    with pytest.raises(ValueError, match="nothing to bound"):
        proven_bound(problem, Proof(Fraction(0), 1, ()))


def test_checking_does_not_import_the_solver():
    code = "import sys, fxpar.solver.certificate; sys.exit(any(m.split('.')[0] == 'ortools' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
