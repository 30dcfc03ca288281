"""The certificate of a chosen plan: the problem it answers, what its decisions cost there, and proven bounds.

Everything here can be counted again by ``fxpar check --certificate`` (fxpar.certificate), without the solver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Literal

import msgspec

from fxpar.constraints import UNCONSTRAINED, Constraints
from fxpar.formulate import Formulation
from fxpar.overlap import CommunicationPrices, overlap_bound
from fxpar.plans.plan import Certificate, Decisions, Overlap, Proof, Question
from fxpar.priced_problem import formulate_question
from fxpar.prices import Prices
from fxpar.solver import certificate as solver
from fxpar.solver.problem import Problem
from fxpar.solver.prove import prove


def question_of(
    formulation: Formulation, prices: Prices, roles: tuple[str, ...], parameters_cut: bool | None,
    batch_dim: int | None, optimizer_bytes: Callable[[str, str], int], constraints: Constraints = UNCONSTRAINED,
) -> Question:
    """What a certificate says of a formulation, so that it can be made again."""
    program = formulation.program
    sizes = tuple(
        optimizer_bytes(program.types[i.value].dtype, i.name) if i.kind == "parameter" else 0 for i in program.inputs
    )
    return Question(
        roles, parameters_cut, batch_dim, bool(formulation.modes), formulation.problem.budget, sizes,
        solver.problem_digest(formulation.problem), msgspec.json.encode(prices.cluster, order="sorted"),
        constraints.zero, tuple(pin.text for pin in constraints.pins), formulation.reuse, formulation.temporaries,
        formulation.unit, formulation.in_time.reduce_each, formulation.in_time.hold,
    )


def certify(
    formulation: Formulation, decisions: Decisions, prices: Prices, question: Question, *,
    status: Literal["optimal", "feasible"], multiplier: Fraction,
) -> Certificate | None:
    """The certificate of decisions in a formulated problem, None when they are not among its assignments.

    Decisions that need more memory than the problem's budget (the row counts more than the simulator finds) are held
    against the problem with as much as they need: its bound is the lower one.

    Args:
        question: of :func:`question_of`.
        status: what the search says of the decisions in this problem.
        multiplier: ns per unit of memory at which the search found its bound.
    """
    assignment = formulation.assignment(decisions)
    cost = None if assignment is None else formulation.problem.cost(assignment)
    if assignment is None or cost is None:
        return None
    problem = formulation.problem
    memory = problem.memory(assignment)
    if problem.budget is not None and memory > problem.budget:
        problem = replace(problem, budget=memory)
        question = msgspec.structs.replace(question, budget_units=memory, digest=solver.problem_digest(problem))
    proven = prove(problem, multiplier, at_most=cost)
    if proven is None:
        return None
    proof, bound = proven

    def communication() -> Problem:
        alone = CommunicationPrices(prices.cluster, prices.mesh, prices)
        return formulate_question(formulation.program, formulation.mesh, alone, question, decisions.recompute).problem

    mixed = overlap_bound(problem, communication, multiplier)
    overlap = None if mixed is None else Overlap(mixed[0], recorded(mixed[1], mixed[2]))
    gap = (cost - bound) / max(cost, 1)
    return Certificate(status, cost, bound, gap, question, recorded(proof, bound), overlap)


def recorded(proof: solver.Proof, bound: int) -> Proof:
    """A proof as the plan holds it: equal vectors once."""
    vectors = {vector: number for number, vector in enumerate(dict.fromkeys(proof.payments))}
    links = tuple(vectors[vector] for vector in proof.payments)
    fraction = proof.multiplier
    return Proof(bound, (fraction.numerator, fraction.denominator), proof.quantum, tuple(vectors), links)


def unrecorded(proof: Proof) -> solver.Proof:
    """Inverse of :func:`recorded`, for a proof that ``fxpar.plans.check`` has looked at."""
    payments = tuple(proof.vectors[link] for link in proof.links)
    return solver.Proof(Fraction(*proof.multiplier), proof.quantum_ns, payments)
