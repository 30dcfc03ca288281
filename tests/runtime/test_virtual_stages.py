"""Plans with stages and random choices inside them on virtual ranks: the whole program's numbers."""

import random

import pytest
import torch

from fxpar.runtime.interpret import run_global
from fxpar.runtime.virtual import run_virtual
from fxpar.step_values import input_values
from tests.runtime.pipelines import batch, built, staged_plan, whole_program


def check(name, mesh, schedule, microbatches, seed):
    plan = staged_plan(name, mesh, schedule, microbatches, choices=seed, seed=seed)
    model, (args, kwargs) = built(name), batch(name)
    whole = whole_program(name)
    want = run_global(whole, input_values(whole, model, args, kwargs, seed=3))
    got = run_virtual(plan.program, plan.decisions, input_values(plan.program, model, args, kwargs, seed=3))
    expected = {(o.kind, o.name): t for o, t in zip(whole.outputs, want, strict=True)}
    assert len(plan.program.outputs) == len(expected)
    for output, tensor, apart in zip(plan.program.outputs, got.outputs, got.disagreement, strict=True):
        torch.testing.assert_close(tensor, expected[output.kind, output.name], rtol=1e-10, atol=1e-10)
        assert apart == 0.0, output


@pytest.mark.parametrize(("name", "mesh", "schedule", "microbatches"), [
    ("gpt2", "dp=2,pp=2", "1f1b", 4), ("t5", "pp=4,tp=2", "zbv", 2), ("unet", "pp=2,a=3", "interleaved", 2),
    ("bert_dropout", "pp=3", "gpipe", 4),
])
def test_stages_with_random_choices(name, mesh, schedule, microbatches):
    check(name, mesh, schedule, microbatches, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "unet", "vit", "bert_dropout"])
def test_many_of_them(name):
    draw = random.Random(name)
    for seed in range(12):
        mesh = draw.choice(["pp=2,a=2", "a=2,pp=3", "pp=2,a=2,b=2", "pp=4", "pp=2,a=3"])
        check(name, mesh, draw.choice(["1f1b", "interleaved", "zbv"]), draw.choice([1, 2, 4, 8]), seed)
