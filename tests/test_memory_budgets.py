"""Plans within any budget down to the least that the search can fill: they run, and stay below it."""

from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.plans.errors import Infeasible
from fxpar.plans.layout import Shard
from fxpar.verify import verify_plan
from tests.compiled import captured
from tests.test_memory_is_real import measured

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent


def cuts_parameters(plan):
    stored = zip(plan.program.inputs, plan.decisions.inputs, strict=True)
    return any(i.kind == "parameter" and any(isinstance(p, Shard) for p in lay) for i, lay in stored)


def least_budget(plan_within, plan):
    """(the least peak that the search finds, a budget of which it finds nothing), within 1 % of each other."""
    best, below = plan.prediction.peak_bytes, 0
    while best - below > 0.01 * best:
        budget = (best + below) // 2 if below else best // 2
        try:
            best = plan_within(budget).prediction.peak_bytes
        except Infeasible:
            below = budget
    return best, below


SIZES = {"width": 32, "heads": 2, "layers": 8, "batch": 8, "length": 128}
"""Most of the memory is activations: what is smaller than a bucket of gradients is reduced at the end, whole."""
MODEL = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
from tests.compiled import decoder_source

source = decoder_source(**{SIZES})
build, example_inputs, loss, optimizer = source.build, source.example_inputs, source.loss, source.optimizer
META = {{"batch_dim": 0}}
"""


def source():
    return captured("decoder", **SIZES)[1]


@cache
def within(budget: int | None):
    taken, model = captured("decoder", **SIZES)
    return compile_model(model, mesh="dp=4", memory=budget, captured=taken).plan


def check(plan, budget):
    """It computes what one device does, and neither the prediction nor any rank goes beyond the budget."""
    assert plan.prediction.peak_bytes <= budget and measured(plan, source()) <= budget
    report = verify_plan(plan, source())
    assert report.ok, report.text()


@pytest.mark.parametrize("share", [pytest.param(share, marks=[pytest.mark.slow] * slow)
                                   for share, slow in ((1.0, True), (0.7, False), (0.5, True), (0.35, False))])
def test_a_part_of_the_memory_is_enough(share):
    budget = int(share * within(None).prediction.peak_bytes)
    plan = within(budget)
    check(plan, budget)
    assert bool(plan.decisions.recompute) == (share < 1)
    if share < 0.4:
        assert cuts_parameters(plan)


@pytest.mark.slow
def test_real_ranks_stay_within_a_third_of_the_memory(tmp_path):
    plan = within(int(0.35 * within(None).prediction.peak_bytes))
    (tmp_path / "model.py").write_text(MODEL)
    real = load_model_source(str(tmp_path / "model.py"))
    plan = msgspec.structs.replace(plan, fingerprint=compile_model(real, mesh="dp=4").plan.fingerprint)
    report = verify_plan(plan, real, ranks="gloo", dtype="f32", memory=True)
    assert report.ok, report.text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_just_below_the_least_memory_is_refused_and_just_above_runs():
    least, _ = least_budget(within, within(None))
    with pytest.raises(Infeasible) as caught:
        within(int(0.98 * least))
    error = caught.value
    assert error.what and error.where and error.numbers and error.way_out
    for part in ("does not fit", "per device", "parameters", "gradients", "optimizer", "activations", "--memory"):
        assert part in str(error), part
    check(within(int(1.02 * least)), int(1.02 * least))
