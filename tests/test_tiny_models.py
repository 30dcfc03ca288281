"""Every model of tests/models: a random plan on a 2x2 mesh equals eager in float64. All of them: pytest -m slow."""

from pathlib import Path

import pytest
import torch

from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.verify import verify_plan

torch.set_num_threads(1)
MODELS = sorted((Path(__file__).parent / "models").glob("*.py"))
QUICK = ("dlrm", "lstm_ctc", "unet")


def check(path, seed):
    source = load_model_source(str(path))
    report = verify_plan(compile_model(source, mesh="2x2", random_choices=seed).plan, source, dtype="f64")
    assert report.ok, report.text()


@pytest.mark.parametrize("name", QUICK)
def test_random_plan_equals_eager(name):
    check(Path(__file__).parent / "models" / f"{name}.py", seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_random_plans_of_every_model(path):
    check(path, seed=11)
