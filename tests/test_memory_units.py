"""The unit of memory follows the budget, and a certificate says which it is."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fxpar.certificate import certificate_findings
from fxpar.compile import compile_model
from fxpar.memory_units import LEAST_UNIT, MEMORY_UNIT, STEPS, unit_for, units
from fxpar.plans.check import plan_problems
from tests.compiled import captured

GIB = 2**30


@given(st.integers(0, 2**50))
def test_a_budget_has_enough_units(budget):
    unit = unit_for(budget)
    assert LEAST_UNIT <= unit <= MEMORY_UNIT and unit.bit_count() == 1
    assert budget // unit >= STEPS or unit == LEAST_UNIT
    assert budget // unit < 2 * STEPS or unit in (LEAST_UNIT, MEMORY_UNIT)
    assert unit_for(budget + 1) >= unit
    assert budget <= units(budget, unit) * unit < budget + unit


def test_from_a_gibibyte_on_it_is_64_kib():
    assert unit_for(GIB) == unit_for(80 * GIB) == MEMORY_UNIT == 4 * unit_for(GIB // 4)


def test_a_plan_within_a_small_budget_is_certified_in_its_unit():
    taken, source = captured("decoder", width=64, heads=4, layers=3, batch=16, length=64)
    free = compile_model(source, mesh="dp=2", captured=taken).plan
    budget = int(0.7 * free.prediction.peak_bytes)
    plan = compile_model(source, mesh="dp=2", memory=budget, captured=taken).plan
    question = plan.certificate.question
    assert question.memory_unit == unit_for(budget) < MEMORY_UNIT
    findings = list(certificate_findings(plan))
    assert not [f for f in findings if f.outcome == "problem"], findings
    assert any(f.text.startswith("verified") for f in findings)
    other = msgspec.structs.replace(plan, certificate=msgspec.structs.replace(
        plan.certificate, question=msgspec.structs.replace(question, memory_unit=2 * question.memory_unit)))
    assert [f for f in certificate_findings(other) if f.outcome == "problem"]
    wrong = msgspec.structs.replace(plan, certificate=msgspec.structs.replace(
        plan.certificate, question=msgspec.structs.replace(question, memory_unit=0)))
    assert any("units of 0 bytes" in text for text in plan_problems(wrong))
