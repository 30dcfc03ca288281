"""A certificate is verified from the plan alone, and whatever is changed in the plan is found."""

import dataclasses
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.captured import capture_program
from fxpar.certificate import certificate_findings
from fxpar.certify import certify, question_of
from fxpar.compile import compile_model
from fxpar.formulate import formulate
from fxpar.model_source import load_model_source
from fxpar.plans.codec import decode, encode
from fxpar.plans.lifetimes import hub_partners, keep_copies
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Plan
from fxpar.priced_problem import formulate_again, formulate_question
from fxpar.progress import silent
from fxpar.solver.certificate import problem_digest
from fxpar.solver.random_assignment import random_assignment
from fxpar.solver.solve import solve
from tests.compiled import adamw, captured, decoder_plan, mlp_plan, prices

replace = msgspec.structs.replace
PLANS = {
    "mlp": lambda: mlp_plan("2x2"),
    "decoder": lambda: decoder_plan("2"),
    "named axes": lambda: decoder_plan("dp=2,tp=2"),
    "little memory": lambda: decoder_plan("2", memory=900_000),
}


def problems(plan: Plan) -> list[str]:
    return [f"{f.check}: {f.text}" for f in certificate_findings(plan) if f.outcome == "problem"]


def with_certificate(plan: Plan, **changes) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, **changes))


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_verified_after_reading_them_from_their_file(name):
    plan = decode(encode(PLANS[name]()))
    found = {f.check: f for f in certificate_findings(plan)}
    assert not problems(plan)
    assert found["bound"].text.startswith("verified") and found["any overlap"].text.startswith("verified")
    c = plan.certificate
    assert c.bound_ns == c.proof.bound_ns <= c.cost_ns
    assert c.overlap.bound_ns <= max(plan.prediction.compute_ns, plan.prediction.communication_ns)
    assert 2 * c.overlap.bound_ns >= c.bound_ns - 2  # half of each is one of the mixtures


@settings(max_examples=30)
@given(st.sampled_from(["mlp", "named axes"]), st.data())
def test_a_changed_plan_is_caught(name, data):
    plan = PLANS[name]()
    c, d = plan.certificate, plan.decisions
    changes = {
        "choice": lambda: replace(plan, decisions=other_choice(plan, data)),
        "layout": lambda: replace(plan, decisions=other_layout(plan, data)),
        "bound": lambda: raised(plan, data.draw(st.integers(1, max(c.cost_ns - c.bound_ns, 1)))),
        "bound alone": lambda: with_certificate(plan, bound_ns=c.bound_ns + 1),
        "cost": lambda: with_certificate(plan, cost_ns=c.cost_ns + data.draw(st.integers(1, 10**6))),
        "proof": lambda: with_certificate(plan, proof=other_proof(c.proof, data)),
        "overlap": lambda: with_certificate(plan, overlap=replace(c.overlap, proof=replace(
            c.overlap.proof, bound_ns=c.overlap.proof.bound_ns + 1))),
        "weight": lambda: with_certificate(plan, overlap=replace(
            c.overlap, compute_quarters=(c.overlap.compute_quarters + 1) % 5)),
        "rates": lambda: with_certificate(plan, question=replace(c.question, rates=faster(c.question.rates))),
        "budget": lambda: with_certificate(plan, question=replace(
            c.question, budget_units=(c.question.budget_units or 0) + 1)),
        "digest": lambda: with_certificate(plan, question=replace(c.question, digest="0" * 64)),
        "optimizer": lambda: with_certificate(plan, question=replace(
            c.question, optimizer_bytes=(10**9,) * len(c.question.optimizer_bytes))),
        "recompute": lambda: replace(plan, decisions=replace(d, recompute=tuple(
            i for i, n in enumerate(plan.program.nodes) if n.phase == "forward"))),
        "copies": lambda: replace(plan, decisions=replace(d, reuse=()) if d.reuse else keep_copies(
            plan.program, d, hub_partners(plan.program))),
        "copies could be kept": lambda: with_certificate(plan, question=replace(c.question, reuse="never")),
    }
    what = data.draw(st.sampled_from(sorted(changes)))
    changed = changes[what]()
    assert changed != plan and problems(changed), what


def other_choice(plan: Plan, data):
    """Another choice for one op, of those that the problem offers it and that cost something else."""
    formulation = formulate_again(plan)[0]
    priced = [i for i, c in enumerate(formulation.classes.nodes)
              if len({*formulation.problem.variables[c].costs.tolist()}) > 1]
    index = data.draw(st.sampled_from(priced))
    names = {s.names for s in formulation.node_states[formulation.classes.nodes[index]]}
    now = plan.decisions.choices[index]
    names = data.draw(st.sampled_from(sorted(names - {now})))
    choices = (*plan.decisions.choices[:index], names, *plan.decisions.choices[index + 1 :])
    return replace(plan.decisions, choices=choices)


def other_layout(plan: Plan, data):
    """Another stored layout for one parameter."""
    formulation = formulate_again(plan)[0]
    trained = [i for i, item in enumerate(plan.program.inputs) if item.kind == "parameter"]
    index = data.draw(st.sampled_from(trained))
    states = [s for s in formulation.input_states[formulation.classes.inputs[index]]
              if s != plan.decisions.inputs[index]]
    layout = data.draw(st.sampled_from(states)) if states else plan.decisions.inputs[index][::-1]
    inputs = (*plan.decisions.inputs[:index], layout, *plan.decisions.inputs[index + 1 :])
    return replace(plan.decisions, inputs=inputs)


def raised(plan: Plan, by: int) -> Plan:
    """The bound raised everywhere it stands, and the gap with it."""
    c = plan.certificate
    bound = c.bound_ns + by
    return with_certificate(plan, bound_ns=bound, gap=(c.cost_ns - bound) / c.cost_ns, proof=replace(
        c.proof, bound_ns=bound))


def other_proof(proof, data):
    """Payments of one pair of another size, or all of them ten times as large."""
    if data.draw(st.booleans()):
        return replace(proof, vectors=tuple((*vector, 0) for vector in proof.vectors))
    return replace(proof, quantum_ns=proof.quantum_ns * 10)


def faster(rates: bytes) -> bytes:
    cluster = json.loads(rates)
    cluster["device"]["memory_bandwidth"] *= 2
    return json.dumps(cluster).encode()


def test_rates_that_cannot_be_read_are_said():
    plan = mlp_plan("2x2")
    wrong = with_certificate(plan, question=replace(plan.certificate.question, rates=b"{}"))
    assert any("cannot be read" in f.text for f in certificate_findings(wrong))


def test_a_plan_without_proof_says_so():
    """Plans of older versions, and random ones."""
    old = with_certificate(mlp_plan("2x2"), question=None, proof=None, overlap=None, status="feasible")
    old = decode(encode(old))
    assert not problems(old)
    assert "no certificate that can be checked" in [f.text for f in certificate_findings(old)][-1]
    drawn = mlp_plan("2", random_choices=3)
    assert not problems(drawn) and drawn.certificate.question is None


def test_the_problem_is_the_same_when_it_is_made_again():
    plan = decode(encode(decoder_plan("2", memory=900_000)))
    assert problem_digest(formulate_again(plan)[0].problem) == plan.certificate.question.digest


def test_where_memory_binds_its_price_is_in_the_proof():
    """The budget of the problem set to less than its best plan needs."""
    plan = decoder_plan("2")
    formulation, rates = formulate_again(plan)
    roomy = formulation.problem.memory(formulation.assignment(plan.decisions))
    tight = formulate_question(plan.program, plan.decisions.mesh, rates, replace(
        plan.certificate.question, recompute_free=True, budget_units=0), ())
    least = solve(tight.problem).min_memory
    tight = dataclasses.replace(tight, problem=dataclasses.replace(tight.problem, budget=(least + roomy) // 2))
    found = solve(tight.problem, gap=0.0)
    decisions = tight.decisions(found.assignment)
    sizes = dict(zip((i.name for i in plan.program.inputs), plan.certificate.question.optimizer_bytes, strict=True))
    question = question_of(tight, rates, ("",), None, None, lambda dtype, name: sizes[name])
    made = certify(tight, decisions, rates, question, status="feasible", multiplier=found.multiplier)
    assert found.multiplier > 0 and made.proof.multiplier[0] > 0 and made.bound_ns <= made.cost_ns == found.cost
    assert not [p for p in problems(replace(plan, decisions=decisions, certificate=made)) if "step time" not in p]
    less = msgspec.structs.replace(question, budget_units=0)
    assert any("infeasible: they need" in p for p in problems(
        replace(plan, decisions=decisions, certificate=replace(made, question=with_digest(plan, less, rates)))))


def with_digest(plan, question, rates):
    again = formulate_question(plan.program, plan.decisions.mesh, rates, question, ())
    return replace(question, digest=problem_digest(again.problem))


def test_decisions_are_read_back_where_the_last_layer_drops_what_the_others_keep(repository):
    """Llama in bf16: nothing in backward wants the last residual, so its class reads as kept and as dropped."""
    source = load_model_source(str(repository / "tests" / "models" / "llama.py"))
    program, _ = capture_program(source, outputs=("loss",), precision="bf16", progress=silent)
    form = formulate(program, parse_mesh("2"), prices("2"), budget_bytes=None, optimizer_bytes=adamw, recompute=None)
    for seed in range(10):
        assert form.assignment(form.decisions(random_assignment(form.problem, seed))) is not None


def test_values_live_at_the_peak_are_part_of_the_question():
    """Where they decide what fits, the row that is proven counts them, and the proof is of no other row."""
    taken, source = captured("decoder", length=64, batch=16)
    plan = compile_model(source, mesh="2", captured=taken, memory=2_700_000).plan
    question = plan.certificate.question
    assert question.temporaries and plan.certificate.gap < 0.01
    assert not problems(plan)
    for changed in (question.temporaries[1:], (*question.temporaries, question.temporaries[0]), ()):
        assert problems(with_certificate(plan, question=replace(question, temporaries=changed)))
