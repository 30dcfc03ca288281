import pytest
import torch
from torch import nn

from fxpar.model_source import load_model_source
from fxpar.optimizer_state import OptimizerState, optimizer_state_bytes
from fxpar.plans.errors import FxparError, UnsupportedError

MODEL = """
import torch
from torch import nn
def build():
    model = nn.Sequential(nn.Embedding(50000, 4096), nn.Linear(4096, 8), nn.BatchNorm1d(8), nn.Linear(8, 1).bfloat16())
    model[0].weight.requires_grad_(False)
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    return model
def example_inputs():
    return (torch.zeros(2, dtype=torch.int64),), {}
"""


@pytest.fixture
def path(model_file):
    return model_file(MODEL)


@pytest.mark.parametrize(
    ("optimizer", "fp32", "bf16", "fixed"),
    [
        (None, 8, 4, 4),
        ("adamw", 8, 4, 4),
        ("adam", 8, 4, 4),
        ("sgd", 4, 2, 0),
        ("rmsprop", 4, 2, 4),
        ("adagrad", 4, 2, 4),
        (lambda ps: torch.optim.SGD(ps, lr=0.1), 0, 0, 0),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), 12, 6, 4),
    ],
)
def test_states_are_measured_for_every_trained_parameter(path, optimizer, fp32, bf16, fixed):
    states = optimizer_state_bytes(load_model_source(path, optimizer=optimizer))
    assert states["1.weight"] == states["2.bias"] == OptimizerState(fp32, fixed)
    assert states["3.weight"] == OptimizerState(bf16, fixed)
    assert states["scale"] == OptimizerState(0, fp32 + fixed)
    assert "0.weight" not in states and len(states) == 7
    assert states["1.weight"].bytes_for(10) == 10 * fp32 + fixed


def test_measured_equals_a_real_step(path):
    source = load_model_source(path, optimizer="adamw")
    model = nn.Linear(37, 11)
    measured = optimizer_state_bytes(source, model.named_parameters())
    optimizer = source.optimizer(list(model.parameters()))
    model(torch.ones(2, 37)).sum().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        real = sum(value.numel() * value.element_size() for value in optimizer.state[p].values())
        assert measured[name].bytes_for(p.numel()) == real


def test_a_state_that_cannot_be_cut_is_refused_by_name(path):
    with pytest.raises(UnsupportedError, match="Adafactor"):
        optimizer_state_bytes(load_model_source(path, optimizer=torch.optim.Adafactor))


def test_what_the_optimizer_raises_shows_the_line(model_file):
    bad = MODEL + "def optimizer(params):\n    return torch.optim.SGD(params, lr=-1)\n"
    with pytest.raises(FxparError, match="model.py:12, in optimizer"):
        optimizer_state_bytes(load_model_source(model_file(bad)))
    with pytest.raises(FxparError, match="returned a int|a list of parameters"):
        optimizer_state_bytes(load_model_source(model_file(MODEL + "def optimizer(params):\n    return 3\n")))


def test_nothing_to_train_has_no_state(path):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert optimizer_state_bytes(load_model_source(path), frozen.named_parameters()) == {}
