"""``fxpar check --certificate``: everything the certificate claims, counted again from the plan alone.

The problem is formulated again and compared by digest; the decisions' cost and memory are counted in it; the bounds are
counted from their proofs in one pass (fxpar.solver.certificate). Nothing is solved, and nothing recorded is believed.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpar.certify import unrecorded
from fxpar.finding import Finding
from fxpar.formulate import Formulation, formulate
from fxpar.often import in_time_of
from fxpar.overlap import QUARTERS, CommunicationPrices, mixture
from fxpar.plans.errors import FxparError
from fxpar.plans.plan import Certificate, Plan, Proof
from fxpar.priced_problem import formulate_again, formulate_question, named_cluster, plan_cluster
from fxpar.prices import Prices
from fxpar.show import gib, ms
from fxpar.simulate import simulate
from fxpar.simulate_stages import simulate_stages
from fxpar.solver.certificate import problem_digest, proven_bound
from fxpar.solver.problem import Problem
from fxpar.work_bound import least_step_ns

NO_PROOF = "no certificate that can be checked"


def certificate_findings(plan: Plan) -> Iterator[Finding]:
    """What can be said of the certificate without the solver, the first thing that differs first."""
    c = plan.certificate
    yield arithmetic(c)
    try:
        prices = Prices(plan_cluster(plan), plan.decisions.mesh)
    except FxparError as error:
        yield Finding("cost", "note", f"not counted again, the cluster is not known here: {error.what}")
        return
    yield from rates_findings(plan, prices)
    yield step_finding(plan, prices)
    yield from everywhere_finding(plan, prices)
    if plan.decisions.pipeline is not None:
        yield Finding("cost", "note", "nothing is proven of the placements of plans with stages")
    elif c.status == "random":
        yield Finding("cost", "note", "random choices: nothing is claimed of their cost")
    elif c.question is None or c.proof is None:
        yield cost_alone(plan, prices)
        yield Finding("bound", "note", f"{NO_PROOF}: the plan holds none (an older fxpar made it, or its decisions are "
                                       f"not among those that the solver chose from)")
    else:
        yield from proof_findings(plan, c, c.proof, prices)


def arithmetic(c: Certificate) -> Finding:
    """Do the recorded figures fit together?"""
    said = f"cost {c.cost_ns} ns, bound {c.bound_ns} ns, gap {c.gap:.4%}"
    if c.status == "random":
        return Finding("certificate", "ok", "random: none")
    if not c.bound_ns <= c.cost_ns or abs(c.gap - (c.cost_ns - c.bound_ns) / max(c.cost_ns, 1)) > 1e-6:
        return Finding("certificate", "problem", said)
    if c.status == "optimal" and c.gap > 0 and c.proof is None:
        return Finding("certificate", "problem", f"it says optimal with a gap of {c.gap:.4%}")
    if c.proof is not None and c.proof.bound_ns != c.bound_ns:
        return Finding("certificate", "problem", f"bound {c.bound_ns} ns, its proof is of {c.proof.bound_ns} ns")
    return Finding("certificate", "ok", f"{c.status}: {said}")


def rates_findings(plan: Plan, prices: Prices) -> Iterator[Finding]:
    """Are the rates in the plan those that the cluster's name has here?"""
    question = plan.certificate.question
    if question is None:
        return
    try:
        here = named_cluster(plan)
    except FxparError as error:
        yield Finding("rates", "note", f"those in the plan; here {plan.cluster} is not known: {error.what}")
        return
    if here == prices.cluster:
        yield Finding("rates", "ok", f"those of {plan.cluster}")
    else:
        yield Finding("rates", "note", f"those in the plan; {plan.cluster} has other rates here")


def step_finding(plan: Plan, prices: Prices) -> Finding:
    """Is the step time what the simulator counts here?"""

    def nothing(dtype: str, name: str) -> int:
        return 0

    if plan.decisions.pipeline is None:
        counted = simulate(plan.program, plan.decisions, prices, nothing).step_ns
    else:
        counted = simulate_stages(plan.program, plan.decisions, prices.cluster, nothing)[0].step_ns
    if counted == plan.prediction.step_ns:
        return Finding("step time", "ok", f"replayed again, {counted} ns (simulated)")
    return Finding("step time", "problem",
                   f"the plan says {plan.prediction.step_ns} ns, replayed here {counted} ns (simulated)")


def everywhere_finding(plan: Plan, prices: Prices) -> Iterator[Finding]:
    """Is the bound on all plans of the cluster what the work alone takes?"""
    recorded = plan.certificate.everywhere_ns
    if not recorded:
        return
    counted = least_step_ns(plan.program, prices.cluster)
    if counted == recorded:
        count = plan.decisions.mesh.world_size
        yield Finding("any plan", "ok", f"verified: no plan on {count} devices takes less than {ms(counted)}, whatever "
                                        f"its mesh, stages, microbatches and schedule")
    else:
        yield Finding("any plan", "problem", f"the plan says that none takes less than {recorded} ns, the work alone "
                                             f"takes {counted} ns")


def proof_findings(plan: Plan, c: Certificate, proof: Proof, prices: Prices) -> Iterator[Finding]:
    """Problem, decisions, cost and bounds."""
    assert c.question is not None
    try:
        made = formulate_again(plan)
    except FxparError as error:
        yield Finding("problem", "problem", f"it cannot be formulated again: {error.what}")
        return
    assert made is not None
    formulation = made[0]
    digest = problem_digest(formulation.problem)
    if digest != c.question.digest:
        text = (f"formulated again it is {digest[:12]}, the certificate is of {c.question.digest[:12]}: the program, "
                f"the mesh, the rates or the rules are not those that were priced")
        yield Finding("problem", "problem", text)
        return
    count = len(formulation.problem.variables)
    yield Finding("problem", "ok", f"formulated again, {count} decisions, the same numbers")
    yield from decision_findings(plan, formulation)
    yield bound_finding("bound", formulation.problem, proof, c.cost_ns)
    if c.overlap is not None:
        alone = CommunicationPrices(prices.cluster, prices.mesh, prices)
        sent = formulate_question(plan.program, plan.decisions.mesh, alone, c.question, plan.decisions.recompute)
        mixed = mixture(formulation.problem, sent.problem, c.overlap.compute_quarters)
        yield bound_finding("any overlap", mixed, c.overlap.proof, None)


def cost_alone(plan: Plan, prices: Prices) -> Finding:
    """What the decisions of a plan without a question cost: ops and reshards, counted from the tables."""
    formulation = formulate(
        plan.program, plan.decisions.mesh, prices, budget_bytes=None, optimizer_bytes=lambda dtype, name: 0,
        recompute=plan.decisions.recompute, reuse="free",
        in_time=in_time_of(plan.decisions),
    )
    assignment = formulation.assignment(plan.decisions)
    cost = None if assignment is None else formulation.problem.cost(assignment)
    if cost is None:
        return Finding("cost", "note", "not counted again: the decisions are not among the states of the problem here")
    return cost_finding(cost, plan.certificate.cost_ns)


def cost_finding(cost: int, recorded: int) -> Finding:
    """Is the cost counted here the recorded one?"""
    if cost == recorded:
        return Finding("cost", "ok", f"the decisions cost {cost} ns in the priced problem, as recorded")
    return Finding("cost", "problem", f"the decisions cost {cost} ns in the priced problem, recorded {recorded} ns")


def decision_findings(plan: Plan, formulation: Formulation) -> Iterator[Finding]:
    """Are the decisions an assignment of the problem, within its memory, at the recorded cost?"""
    problem = formulation.problem
    assignment = formulation.assignment(plan.decisions)
    if assignment is None:
        yield Finding("decisions", "problem", f"infeasible: {outside(plan, formulation)}")
        return
    cost, memory = problem.cost(assignment), problem.memory(assignment)
    if cost is None:
        yield Finding("decisions", "problem", "infeasible: two of them may not be taken together")
        return
    if problem.budget is not None and memory > problem.budget:
        text = f"infeasible: they need {gib(memory * formulation.unit)} of {gib(problem.budget * formulation.unit)}"
        yield Finding("decisions", "problem", text)
    yield cost_finding(cost, plan.certificate.cost_ns)


def outside(plan: Plan, formulation: Formulation) -> str:
    """The first decision that the problem does not offer, in words."""
    decisions, classes = plan.decisions, formulation.classes
    for index, (c, names) in enumerate(zip(classes.nodes, decisions.choices, strict=True)):
        if all(state.names != names for state in formulation.node_states[c]):
            node = plan.program.nodes[index]
            return f"choice {' '.join(names)} of op {index}, {node.op} ({node.module}), is not offered"
    for item, c, layout in zip(plan.program.inputs, classes.inputs, decisions.inputs, strict=True):
        if layout not in formulation.input_states[c]:
            return f"the layout of {item.name} is not offered"
    return "they differ inside a group of repeated layers, or in what is recomputed"


def bound_finding(name: str, problem: Problem, proof: Proof, cost: int | None) -> Finding:
    """Does the proof prove what is recorded?"""
    try:
        bound = proven_bound(problem, unrecorded(proof))
    except ValueError as error:
        return Finding(name, "problem", f"its proof is not one of this problem: {error}")
    if bound < proof.bound_ns:
        text = f"the recorded bound of {proof.bound_ns} ns is higher than the {bound} ns that its proof proves"
        return Finding(name, "problem", text)
    if bound > proof.bound_ns:
        return Finding(name, "problem", f"the proof is not the recorded one: it proves {bound} ns, {proof.bound_ns} ns "
                                        f"are recorded")
    if cost is None:
        return Finding(name, "ok", f"verified: no schedule of any plan takes less than {ms(bound // QUARTERS)}")
    return Finding(name, "ok", f"verified: no plan of this problem costs less than {bound} ns, "
                               f"{(cost - bound) / max(cost, 1):.2%} below the cost")
