"""Check says what in a plan does not hold, and which op of a model has changed since."""

import json

import msgspec
import pytest

from fxpar.check import check_plan_with_model
from fxpar.cli.main import main
from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.plans.codec import encode

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).square().mean()


def build():
    return Net()


def example_inputs():
    return (torch.ones(4, 8),), {}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("check")


def source_of(folder, name, text=MODEL):
    path = folder / f"{name}.py"
    path.write_text(text)
    return load_model_source(str(path))


@pytest.fixture(scope="module")
def plan(folder):
    return compile_model(source_of(folder, "net"), mesh="2x2").plan


def outcomes(report):
    return {f.check: f.outcome for f in report.findings}


def text_of(report, check):
    return next(f.text for f in report.findings if f.check == check)


def test_a_sound_plan_of_this_model(plan, folder):
    report = check_plan_with_model(plan, source_of(folder, "net"), certificate=True)
    assert report.ok, report.text()
    found = outcomes(report)
    assert found["trace"] == found["ranks"] == found["choices"] == found["cost"] == found["step time"] == "ok"
    assert found["problem"] == found["bound"] == found["any overlap"] == found["rates"] == "ok"


def test_pinned_and_random_plans_have_their_cost_counted_or_say_so(folder):
    source = source_of(folder, "net")
    pinned = check_plan_with_model(compile_model(source, mesh="dp=2,tp=2").plan, certificate=True)
    assert pinned.ok and outcomes(pinned)["cost"] == outcomes(pinned)["bound"] == "ok", pinned.text()
    drawn = check_plan_with_model(compile_model(source, mesh="2x2", random_choices=1).plan, certificate=True)
    assert drawn.ok and outcomes(drawn)["cost"] == "note", drawn.text()


def test_a_changed_line_is_named(plan, folder):
    report = check_plan_with_model(plan, source_of(folder, "other", MODEL.replace("torch.relu", "torch.tanh")))
    assert not report.ok and outcomes(report)["trace"] == "problem"
    text = text_of(report, "trace")
    assert "aten.tanh.default" in text and "other.py:12 in forward" in text and "it was aten.relu.default" in text
    assert "source of class" in text_of(report, "model")


def test_a_changed_number_is_named(plan, folder):
    scaled = MODEL.replace("self.a(x))", "self.a(x)) * 1.5")
    with_scale = compile_model(source_of(folder, "scaled", scaled), mesh="2").plan
    report = check_plan_with_model(with_scale, source_of(folder, "twice", scaled.replace("1.5", "2.0")))
    assert "argument 1 was 1.5, is 2.0" in text_of(report, "trace")


def test_moved_lines_are_no_difference(plan, folder):
    report = check_plan_with_model(plan, source_of(folder, "moved", MODEL.replace("class Net", "\n\nclass Net")))
    assert report.ok and "source lines have moved" in text_of(report, "trace")


def test_a_choice_that_no_rule_offers(plan):
    choices = (("f9", "."), *plan.decisions.choices[1:])
    wrong = msgspec.structs.replace(plan, decisions=msgspec.structs.replace(plan.decisions, choices=choices))
    report = check_plan_with_model(wrong)
    assert not report.ok and "op 0, " in text_of(report, "choices") and "no choice f9 ." in text_of(report, "choices")


def test_an_op_that_is_not_there(plan):
    nodes = (msgspec.structs.replace(plan.program.nodes[0], op="nolib.f.default"), *plan.program.nodes[1:])
    wrong = msgspec.structs.replace(plan, program=msgspec.structs.replace(plan.program, nodes=nodes))
    report = check_plan_with_model(wrong)
    assert not report.ok and "nolib.f.default" in text_of(report, "ops")


def test_other_versions_are_mentioned(plan):
    made = msgspec.structs.replace(plan.fingerprint, rules="0" * 64, torch="2.12.0")
    report = check_plan_with_model(msgspec.structs.replace(plan, fingerprint=made))
    assert report.ok and outcomes(report)["rules"] == outcomes(report)["torch"] == "note"


@pytest.mark.parametrize(("field", "value"), [("cost_ns", 1), ("bound_ns", 2**60)])
def test_a_certificate_that_is_not_the_plans(plan, field, value):
    wrong = msgspec.structs.replace(plan.certificate, **{field: value})
    report = check_plan_with_model(msgspec.structs.replace(plan, certificate=wrong), certificate=True)
    assert not report.ok and "problem" in (outcomes(report)["certificate"], outcomes(report)["cost"])


def test_the_command(plan, folder, capsys):
    path = folder / "plan.msgpack"
    path.write_bytes(encode(plan))
    source_of(folder, "net")
    assert main(["check", str(path), str(folder / "net.py"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    source_of(folder, "other", MODEL.replace("torch.relu", "torch.tanh"))
    assert main(["check", str(path), str(folder / "other.py")]) == 1
    assert "NOT sound" in capsys.readouterr().out
