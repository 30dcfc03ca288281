"""Remarks on plans: a simpler plan about as fast, axes that cut badly."""

import msgspec
import pytest

from fxpar.advice import NEAR, advice
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Certificate, Plan
from fxpar.show import plan_facts, plan_text, splits_of
from fxpar.splits import SplitDim
from tests.compiled import decoder_plan, mlp_plan

replace = msgspec.structs.replace


def with_data_parallel(plan: Plan, slower: float, fits: bool = True) -> Plan:
    """The plan, its data parallel candidate so much slower than it."""
    step = round(plan.prediction.step_ns * (1 + slower))
    candidates = tuple(
        replace(c, fits=fits, prediction=replace(c.prediction, step_ns=step)) if c.name == "data parallel" else c
        for c in plan.candidates
    )
    return replace(plan, candidates=candidates)


@pytest.mark.parametrize(("slower", "fits", "said"), [
    (0.0, True, True), (NEAR / 2, True, True), (NEAR * 2, True, False), (NEAR / 2, False, False),
])
def test_data_parallel_that_is_about_as_fast_is_named(slower, fits, said):
    plan = with_data_parallel(mlp_plan("2"), slower, fits)
    lines = [text for text in advice(plan, ()) if "data parallel" in text]
    assert len(lines) == said
    if said:
        assert "consider --mesh dp=2" in lines[0]
        assert f"advice: {lines[0]}" in plan_text(plan) and lines[0] in plan_facts(plan)["advice"]


def test_named_axes_and_random_plans_are_not_remarked_on():
    assert not [text for text in advice(decoder_plan("dp=2"), ()) if "data parallel" in text]
    plan = replace(mlp_plan("2"), certificate=Certificate("random", 1, 0, 1.0))
    assert advice(plan, splits_of(plan)) == []


@pytest.mark.parametrize(("name", "size", "pieces", "ragged"), [
    ("ffn", 2048, 3, True), ("ffn", 3072, 3, False), ("vocab", 32000, 3, True), ("batch", 24, 3, False),
    ("batch", 8, 3, True), ("heads", 12, 3, False), ("ffn", 24, 6, True), ("vocab", 30522, 3, False),
])
def test_pieces_that_fill_no_tile_are_named(name, size, pieces, ragged):
    """Uneven ones, and those of a size that was a multiple of 8 and is none any more."""
    plan = replace(mlp_plan("3"), candidates=())
    plan = replace(plan, decisions=replace(plan.decisions, mesh=parse_mesh("3")))
    lines = advice(plan, (SplitDim("a0", name, 0.5, size, pieces),))
    assert len(lines) == ragged
    if ragged:
        assert "a0=3 fragments every product" in lines[0] and f"{name} {size}" in lines[0]
    fine = SplitDim("a0", "batch", 0.5, 24, 3)
    both = advice(plan, (SplitDim("a0", name, 0.5, size, pieces), fine))
    assert all("products with 50% of the flops" in text for text in both)
