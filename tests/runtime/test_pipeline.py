"""Plans with stages on real ranks: losses, gradients, norms and parameters after 5 steps are those of one process.

All of them: ``pytest tests/runtime/test_pipeline.py -m slow`` (20 minutes of two cores)."""

import itertools

import pytest

from fxpar.plans.mesh import parse_mesh
from fxpar.schedules import SCHEDULES
from tests.runtime.pipelines import run_plans, staged_plan

MODELS = ("gpt2", "llama", "bert", "t5", "unet", "vit")


def check(jobs, folder, timeout=240):
    """``jobs``: (model, mesh, schedule, microbatches, seed of choices or None)."""
    by_world = {}
    for model, mesh, schedule, microbatches, choices in jobs:
        title = f"{model} {mesh} {schedule} {microbatches} {choices}"
        plan = staged_plan(model, mesh, schedule, microbatches, choices=choices, seed=len(by_world))
        by_world.setdefault(parse_mesh(mesh).world_size, []).append((title, model, plan))
    for world, plans in by_world.items():
        end = run_plans(world, plans, folder / str(world), timeout)
        assert end.failures == (), end.failures[0][-3000:]


def test_every_schedule_trains_a_tied_model_as_one_process(tmp_path):
    check([("gpt2", "pp=2", schedule, 4, None) for schedule in SCHEDULES], tmp_path)


def test_models_and_numbers_of_microbatches(tmp_path):
    check([("llama", "pp=2", "1f1b", 1, None), ("t5", "pp=2", "interleaved", 2, None),
           ("bert_dropout", "pp=2", "gpipe", 1, None), ("bert_dropout", "pp=2", "zbv", 8, None)], tmp_path)


def test_four_ranks_and_meshes_inside_stages(tmp_path):
    check([("t5", "pp=4", "zbv", 4, None), ("gpt2", "dp=2,pp=2", "1f1b", 4, 1),
           ("llama", "pp=2,tp=2", "zero-bubble", 2, 2)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_of_every_model(model, pp, tmp_path):
    check([(model, f"pp={pp}", schedule, 8, None) for schedule in SCHEDULES], tmp_path, 600)


@pytest.mark.slow
@pytest.mark.parametrize("model", [*MODELS, "bert_dropout"])
def test_numbers_of_microbatches_agree(model, tmp_path):
    check([(model, "pp=2", schedule, m, None) for m, schedule in itertools.product((1, 2, 4, 8), ("1f1b", "zbv"))],
          tmp_path, 600)


@pytest.mark.slow
@pytest.mark.parametrize("model", [*MODELS, "bert_dropout"])
@pytest.mark.parametrize("mesh", ["dp=2,pp=2", "pp=2,tp=2", "pp=2,a=2"])
def test_random_choices_inside_stages(model, mesh, tmp_path):
    names = ("1f1b", "interleaved", "zero-bubble", "dualpipev")
    check([(model, mesh, names[seed], 4, seed) for seed in range(4)], tmp_path, 600)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_three_axes(model, tmp_path):
    check([(model, "dp=2,pp=2,tp=2", schedule, 4, 7) for schedule in ("1f1b", "zbv")], tmp_path, 600)
