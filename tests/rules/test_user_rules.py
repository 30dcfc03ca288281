"""Ops of the user's own: their rules are declared in model.py, judged, planned with, and demanded at load."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace as replaced
from functools import cache
from pathlib import Path

import pytest
import torch

import fxpar
from fxpar.compile import compile_model
from fxpar.model_source import ModelSource, load_model_source
from fxpar.plans.codec import encode
from fxpar.plans.errors import FxparError, PlanMismatch
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Plan
from fxpar.plans.program import Program
from fxpar.rule_check import check_model
from fxpar.rule_coverage import MissingRuleWarning
from fxpar.rules import registry
from fxpar.rules.choices import axis_choices, site_of
from fxpar.rules.factor_rule import Factors, Linear
from fxpar.rules.registry import rule_for
from fxpar.runtime.model import check_ops, check_rules
from fxpar.show import notes
from fxpar.verify import verify_plan
from tests.rules.mutants import in_force, without

torch.set_num_threads(1)
MODEL = Path(__file__).parents[1] / "models" / "custom_op.py"
OPS = ("gated", "gated_backward", "pair_energy", "pair_energy_backward")


@cache
def source() -> ModelSource:
    return load_model_source(str(MODEL))


@cache
def plan(seed: int, mesh: str = "2x2") -> Plan:
    return compile_model(source(), mesh=mesh, random_choices=seed).plan


def custom_nodes(program: Program):
    return [node for node in program.nodes if node.op.startswith("fxpartest.")]


def test_every_op_of_the_model_is_in_the_graph_and_may_be_split() -> None:
    program = plan(0).program
    assert {node.op for node in custom_nodes(program)} == {f"fxpartest.{name}.default" for name in OPS}
    assert all(len(axis_choices(site_of(node, program))) > 2 for node in custom_nodes(program))
    assert not notes(plan(0))


@pytest.mark.parametrize("seed", range(4))
def test_any_plan_is_equal_to_one_device(seed: int) -> None:
    chosen = plan(seed)
    report = verify_plan(chosen, source())
    assert report.ok, report.text()


def test_a_splitting_plan_was_among_them() -> None:
    names = {name for seed in range(4) for node, names in zip(plan(seed).program.nodes, plan(seed).decisions.choices,
             strict=True) if node.op.startswith("fxpartest.") for name in names}
    assert any(name.startswith("f") for name in names) and any(name.startswith("p") for name in names)


def test_rules_are_judged_on_the_calls_of_the_model() -> None:
    report = check_model(source(), plan(0).program, [parse_mesh("2")], examples=16)
    assert report.ok, report.text()
    assert {f"fxpartest.{name}.default" for name in OPS} <= {entry.op for entry in report.judged}


def test_a_wrong_rule_is_found() -> None:
    source()
    right = rule_for("fxpartest.pair_energy.default")
    wrong = replaced(right, factors=lambda call: Factors(right.factors(call).groups, (Linear((0,), (0,)),)))
    with in_force(wrong):
        report = check_model(source(), plan(0).program, [parse_mesh("2")], examples=16)
    assert not report.ok
    assert {entry.op for entry in report.judged if entry.problems} == {"fxpartest.pair_energy.default"}


def test_the_same_rule_may_be_declared_again_and_no_other() -> None:
    source()
    fxpar.rule("fxpartest::pair_energy", "b n h,  b m h -> b n m")
    with pytest.raises(FxparError, match="already has a rule"):
        fxpar.rule("fxpartest::pair_energy", "b n h!, b m h! -> b n m")
    with pytest.raises(FxparError, match="already has a rule"):
        fxpar.rule("aten::mm", "m k, k n -> m n")
    with pytest.raises(FxparError, match="is not a rule"):
        fxpar.rule("fxpartest::nothing", "m k, k n")


def test_a_text_that_does_not_fit_is_an_error_of_the_user() -> None:
    source()
    wrong = rule_for("fxpartest.gated.default")
    fxpar.rule("fxpartest::unfit", "a, b -> a")
    try:
        unfit = replaced(registry._RULES.pop("fxpartest.unfit.default"), op=wrong.op)
        with in_force(unfit), pytest.raises(FxparError, match="does not fit an operand of shape"):
            node = next(n for n in plan(0).program.nodes if n.op == wrong.op)
            axis_choices(site_of(node, plan(0).program))
    finally:
        registry._RULES.pop("fxpartest.unfit.default", None)


def test_other_rules_than_the_plans_are_refused_at_load() -> None:
    check_rules(plan(0))
    declared = rule_for("fxpartest.gated.default")
    with in_force(replaced(declared, declared="other words")), pytest.raises(PlanMismatch, match=r"fxpartest\.gated"):
        check_rules(plan(0))


def test_an_op_without_a_rule_warns_once_and_runs_whole() -> None:
    source()
    plan(0)  # what was computed with the rule must not be taken up without it, nor the other way round
    with without("fxpartest.pair_energy.default"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = compile_model(source(), mesh="2", random_choices=1).plan
        assert verify_plan(made, source()).ok
    assert encode(compile_model(source(), mesh="2", random_choices=1).plan) != encode(made)
    said = [str(w.message) for w in caught if w.category is MissingRuleWarning]
    assert len(said) == 1 and said == notes(made)
    for part in ("fxpartest.pair_energy.default", "custom_op.py:", "gathers", " ns", " bytes",
                 'fxpar.rule("fxpartest::pair_energy", "a! b! c!, d! e! f! -> g! h! i!")'):
        assert part in said[0]
    check_ops(made.program)


LOAD = """
import sys, torch, fxpar
try:
    fxpar.load(sys.argv[1], torch.nn.Linear(2, 2))
except fxpar.FxparError as error:
    print(error)
print("imported" if any(name.startswith("fxpar_model") for name in sys.modules) else "nothing imported")
"""


def test_load_names_an_op_that_is_not_registered_and_imports_nothing(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    file.write_bytes(encode(plan(0, "1")))
    done = subprocess.run([sys.executable, "-c", LOAD, str(file)], capture_output=True, text=True, timeout=120)
    assert "fxpartest.gated.default, which this torch does not have" in done.stdout, done.stderr
    assert "import the module that registers it" in done.stdout and "nothing imported" in done.stdout
