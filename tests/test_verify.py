"""Verify says yes to sound plans and names what differs in unsound ones, on virtual and on real ranks."""

import json

import msgspec
import pytest
import torch

from fxpar.cli.main import main
from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.plans.codec import encode
from fxpar.plans.errors import FxparError, PlanMismatch, UnsupportedError
from fxpar.reference import EagerStep, built, computing_in, widen
from fxpar.verify import verify_plan

MODEL = """
import os

import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 6, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(DROP)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x, y):
        h = self.drop(torch.relu(self.norm(self.up(x))).float())
        return {"loss": F.cross_entropy(self.down(h) * self.frozen, y), "hidden": h}


def build():
    if os.environ.get("RANK") == FAILING:
        raise RuntimeError("no model here")
    return Net()


def example_inputs():
    g = torch.Generator().manual_seed(3)
    return (torch.randn(8, 12, generator=g), torch.randint(0, 6, (8,), generator=g)), {}
"""


def write(folder, drop=0.0, width=10, failing="none"):
    path = folder / f"net{drop}_{width}_{failing}.py"
    text = MODEL.replace("DROP", str(drop)).replace("WIDTH", str(width)).replace("FAILING", repr(failing))
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def source(folder):
    return load_model_source(str(write(folder)))


@pytest.fixture(scope="module")
def plan(source):
    return compile_model(source, mesh="2x2", outputs=("all",)).plan


@pytest.mark.parametrize("dtype", ["f64", "f32"])
def test_a_compiled_plan_is_equal_to_eager(plan, source, dtype):
    report = verify_plan(plan, source, dtype=dtype)
    assert report.ok, report.text()
    kinds = {row.kind: sum(other.kind == row.kind for other in report.rows) for row in report.rows}
    assert kinds == {"loss": 1, "gradient": 6, "buffer": 3, "output": 2}


@pytest.mark.parametrize("seed", range(3))
def test_random_choices_are_equal_too(source, seed):
    report = verify_plan(compile_model(source, mesh="2x2", random_choices=seed).plan, source)
    assert report.ok, report.text()


def test_dropout_is_compared_with_the_same_program_and_the_same_masks(folder):
    source = load_model_source(str(write(folder, drop=0.5)))
    report = verify_plan(compile_model(source, mesh="dp=2,tp=2").plan, source)
    assert report.ok, report.text()
    assert "same random numbers" in report.title


def test_a_wrong_op_is_found(plan, source):
    nodes = tuple(
        msgspec.structs.replace(node, op="aten.sigmoid.default") if node.op == "aten.relu.default" else node
        for node in plan.program.nodes
    )
    wrong = msgspec.structs.replace(plan, program=msgspec.structs.replace(plan.program, nodes=nodes))
    report = verify_plan(wrong, source)
    assert not report.ok and "gradient up.weight: differs" in report.text()


def test_another_model_is_refused(plan, folder):
    other = load_model_source(str(write(folder, width=11)))
    with pytest.raises(PlanMismatch, match=r"up.weight has shape \[11, 12\], in the plan \[10, 12\]"):
        verify_plan(plan, other)


def record(source, shift):
    """One eager step from other weights than build() gives."""
    model = built(source, torch.float32)
    with torch.no_grad():
        model.up.weight += shift
    state = {n: t.clone() for n, t in model.state_dict().items()}
    step = EagerStep(source, model, torch.float32)()
    return {"init_state": state, "loss": step.loss, "grads": step.gradients, "buffers_after": step.buffers,
            "outputs": list(step.outputs)}


def test_a_record_of_a_run_is_the_reference(plan, source, folder):
    path = folder / "ref.pt"
    torch.save(record(source, 0.1), path)
    for dtype in ("f32", "f64"):
        report = verify_plan(plan, source, reference=str(path), dtype=dtype)
        assert report.ok, report.text()
    torch.save(record(source, 0.1) | {"init_state": record(source, 0.2)["init_state"]}, path)
    assert not verify_plan(plan, source, reference=str(path)).ok


def test_an_unreadable_record_is_refused(plan, source, folder):
    path = folder / "bad.pt"
    path.write_text("nothing")
    with pytest.raises(FxparError, match="cannot read the reference"):
        verify_plan(plan, source, reference=str(path))
    torch.save({"loss": torch.zeros(())}, path)
    with pytest.raises(FxparError, match="has no init_state, grads, buffers_after"):
        verify_plan(plan, source, reference=str(path))


BF16 = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32).to(torch.bfloat16)
        self.down = nn.Linear(32, 16, bias=False).to(torch.bfloat16)

    def forward(self, x):
        h = torch.tanh(self.up(x.to(torch.bfloat16)))
        return self.down(h).float().square().mean()


def build():
    return Net()


def example_inputs():
    return (torch.randn(8, 16, generator=torch.Generator().manual_seed(1)),), {}
"""


def test_a_model_in_bfloat16_is_exact_in_double_and_rounded_as_it_is(model_file):
    source = load_model_source(model_file(BF16))
    plan = compile_model(source, mesh="tp=2").plan
    exact = verify_plan(plan, source)
    assert exact.ok and exact.rows[1].tolerance == 1e-10, exact.text()
    rounded = verify_plan(plan, source, dtype="f32")
    assert rounded.ok and rounded.rows[1].tolerance == 4 * 2**-7, rounded.text()


def test_memory_is_compared_where_it_means_something(plan, source):
    with pytest.raises(UnsupportedError, match="live bytes"):
        verify_plan(plan, source, memory=True)


def test_real_ranks_step_and_train_as_one_device(source):
    plan = compile_model(source, mesh="tp=2", outputs=("all",)).plan
    report = verify_plan(plan, source, ranks="gloo")
    assert report.ok, report.text()
    assert {row.kind for row in report.rows} >= {"gradient", "output", "train loss", "train norm", "trained"}
    assert not report.failures and report.as_dict()["ok"]


def test_one_failing_rank_is_reported_and_nothing_hangs(folder):
    source = load_model_source(str(write(folder, failing="1")))
    plan = compile_model(source, mesh="2").plan
    report = verify_plan(plan, source, ranks="gloo", timeout=100)
    assert not report.ok and not report.rows
    assert any("rank 1" in failure and "no model here" in failure for failure in report.failures)


def test_the_command_answers_with_its_exit_code(plan, source, folder, capsys):
    path = folder / "plan.msgpack"
    path.write_bytes(encode(plan))
    assert main(["verify", str(path), source.path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main(["verify", str(path), str(write(folder, width=11))]) == 1
    assert "up.weight" in capsys.readouterr().err


def test_float32_by_name_is_double_in_the_reference():
    with computing_in(torch.float64):
        x = torch.ones(2).to(torch.float32) + torch.zeros(2, dtype=torch.float32).float()
        assert x.dtype is torch.float64 and torch.arange(2).dtype is torch.int64
    assert torch.ones(1).dtype is torch.float32
    assert widen({"a": torch.ones(1), "b": 3}, torch.float64)["a"].dtype is torch.float64
