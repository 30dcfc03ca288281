"""The bound on every plan of the cluster holds for whatever plan is made, and is counted again by the check."""

import functools
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.captured import capture_program
from fxpar.certificate import certificate_findings
from fxpar.compile import compile_model
from fxpar.cost.cluster import parse_cluster
from fxpar.model_source import load_model_source
from fxpar.progress import silent
from fxpar.show import plan_text
from fxpar.work_bound import least_step_ns

MODELS = Path(__file__).parent / "models"
NAMES = ("gpt2", "bert", "t5", "vit", "resnet", "mixtral", "causal", "lstm_ctc")


@functools.cache
def source(name):
    torch.set_num_threads(1)
    return load_model_source(str(MODELS / f"{name}.py"))


@functools.cache
def captured(name, microbatches=1):
    return capture_program(source(name), outputs=("loss",), precision="fp32", progress=silent,
                           microbatches=microbatches)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(["2", "4", "2x2", "3", "4x2"]), st.integers(0, 10**6))
def test_no_plan_computes_less(name, mesh, seed):
    plan = compile_model(source(name), mesh=mesh, random_choices=seed, captured=captured(name)).plan
    assert 0 < plan.certificate.everywhere_ns <= plan.prediction.compute_ns


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
@pytest.mark.parametrize("asked", [dict(mesh="pp=2,dp=2", schedule="1f1b"), dict(mesh="2x2"), dict(mesh="dp=2,tp=2")])
def test_stages_and_microbatches_do_not_take_less_than_the_whole_batch_must(name, asked):
    whole = least_step_ns(captured(name)[0], parse_cluster("4"))
    plan = compile_model(source(name), microbatches=2, captured=captured(name, 2), **asked).plan
    # what a program of microbatches proves holds for all plans, what that of the whole batch proves as well
    assert 0 < plan.certificate.everywhere_ns <= whole <= plan.prediction.step_ns


def test_multiplications_do_not_depend_on_how_often_a_step_is_cut():
    found = [least_step_ns(captured("gpt2", n)[0], parse_cluster("1")) for n in (2, 3)]
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.mark.parametrize("asked", [dict(mesh="2"), dict(mesh="pp=2,dp=2", microbatches=2)])
def test_the_bound_is_shown_and_counted_again(asked):
    plan = compile_model(source("gpt2"), captured=captured("gpt2", asked.get("microbatches", 1)), **asked).plan
    assert "whatever its mesh, stages" in plan_text(plan)
    found = {f.check: f for f in certificate_findings(plan)}
    assert found["any plan"].outcome == "ok"
    assert all(f.outcome != "problem" for f in found.values())
    raised = msgspec.structs.replace(plan.certificate, everywhere_ns=plan.certificate.everywhere_ns + 1)
    wrong = {f.check: f for f in certificate_findings(msgspec.structs.replace(plan, certificate=raised))}
    assert wrong["any plan"].outcome == "problem"
