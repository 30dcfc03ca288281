"""`fxpar rules list`, `coverage` and `check` as a user meets them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fxpar.cli.main import main
from fxpar.model_source import load_model_source
from fxpar.rules.factor_rule import Factors, Linear
from fxpar.rules.registry import rule_for
from tests.rules.mutants import in_force

torch.set_num_threads(1)
CUSTOM = str(Path(__file__).parents[1] / "models" / "custom_op.py")
HISTOGRAM = """
# Ops

| op | models | count |
|---|---|---|
| `aten.mm.default` | 3 | 40 |
| `py:getitem` | 3 | 30 |
| `aten.native_dropout.default` | 1 | 5 |
| `aten._scaled_dot_product_flash_attention_for_cpu.default` | 1 | 4 |
| `aten._assert_tensor_metadata.default` | 1 | 3 |
| `aten.full_like.default` | 1 | 2 |
| `mylib.secret.default` | 1 | 1 |

# Another table, not counted

| `aten.nonzero.default` | 1 | 100 |
"""


def answer(capsys, *arguments: str, code: int = 0) -> dict:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def said(capsys, *arguments: str) -> str:
    """The one message of a command that cannot."""
    assert main(arguments) == 1
    return capsys.readouterr().err


def test_coverage_of_a_table_of_counts(tmp_path, capsys):
    file = tmp_path / "ops.md"
    file.write_text(HISTOGRAM)
    found = answer(capsys, "rules", "coverage", str(file))
    assert (found["calls"], found["covered_calls"], found["ops"], found["covered_ops"]) == (85, 84, 7, 6)
    assert [row[0] for row in found["missing"]] == ["mylib.secret.default"]
    how = {op: text for op, _, text in found["replaced"]}
    assert set(how) >= {"py:getitem", "aten.native_dropout.default", "aten._assert_tensor_metadata.default"}
    assert "fxpar.attention" in how["aten._scaled_dot_product_flash_attention_for_cpu.default"]
    assert main(["rules", "coverage", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "84 of 85 calls (98.82 %) and 6 of 7 ops" in shown and "declare its rule" in shown


def test_coverage_of_a_model_names_line_cost_and_way_out(capsys, monkeypatch):
    from fxpar.rules import registry

    assert answer(capsys, "rules", "coverage", CUSTOM)["undeclared"] == []
    monkeypatch.delitem(registry._RULES, "fxpartest.gated.default")
    monkeypatch.setattr("fxpar.user_rules.declare", lambda *args, **options: None)
    found = answer(capsys, "rules", "coverage", CUSTOM, "--cluster", "1x2:h100")
    (op,) = found["undeclared"]
    assert op["op"] == "fxpartest.gated.default" and op["calls"] == 1 and op["whole_ns"] > 0
    assert op["gathered_bytes"] == 4 * (4 * 6 * 16 + 16)
    assert "custom_op.py" in op["places"][0]
    assert op["declaration"] == 'fxpar.rule("fxpartest::gated", "a! b! c!, d! -> e! f! g!")'
    assert found["covered_ops"] == found["ops"] - 1


def test_coverage_of_nothing_readable(tmp_path, capsys):
    empty = tmp_path / "empty.md"
    empty.write_text("# nothing\n")
    assert "holds no table of op counts" in said(capsys, "rules", "coverage", str(empty))
    assert "No such file" in said(capsys, "rules", "coverage", str(tmp_path / "no.md"))


def test_check_of_ops(capsys):
    found = answer(capsys, "rules", "check", "mm", "aten.relu.*", "--mesh", "3", "--examples", "30")
    assert found["ok"] and found["meshes"] == ["a0=3"] and found["examples"] == 30
    assert {entry["op"] for entry in found["judged"]} == {"aten.mm.default", "aten.relu.default"}
    assert all(entry["examples"] >= 30 and entry["split"] > 0 for entry in found["judged"])
    assert main(["rules", "check", "mm", "arange", "--examples", "9"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 rules are sound, 0 unsound" in shown and "fewest examples: 9 of " in shown
    assert "only computed whole, no other choice in these calls: aten.arange.default" in shown


def test_uneven_and_empty_pieces_are_added_to_the_even_ones(capsys):
    asked = ("rules", "check", "mm", "aten.relu.*", "arange", "--mesh", "3", "--examples", "80")
    plain, more = answer(capsys, *asked), answer(capsys, *asked, "--uneven", "--empty")
    for before, after in zip(plain["judged"], more["judged"], strict=True):
        assert after["examples"] >= before["examples"] >= 80
        assert after["uneven"] < after["examples"]  # even ones are judged too
        wanted = 0 if before["op"] == "aten.arange.default" else 20
        assert after["uneven"] >= wanted and after["empty"] >= wanted


def test_the_answer_does_not_depend_on_the_number_of_processes(capsys):
    asked = ("rules", "check", "mm", "relu", "cat", "arange", "--examples", "12", "--uneven")
    assert answer(capsys, *asked, "--jobs", "2") == answer(capsys, *asked)


def test_check_of_an_unsound_rule_shows_the_counterexample(capsys):
    right = rule_for("aten.relu.default")
    wrong = replace(right, factors=lambda call: Factors(right.factors(call).groups, (Linear((0,), (0,)),)))
    with in_force(wrong):
        assert main(["rules", "check", "relu", "--mesh", "2"]) == 1
        shown = capsys.readouterr().out
        assert "UNSOUND aten.relu.default" in shown and "choice p0" in shown and "differs by" in shown
        assert "0 of 1 rules are sound" in shown
        found = answer(capsys, "rules", "check", "relu", "--mesh", "2", code=1)
    problem = found["judged"][0]["problems"][0]
    assert problem["choice"] == ["p0"] and problem["layouts"] == ["[P(sum)]", "[P(sum)]"]


def test_check_of_a_model_with_ops_of_its_own(capsys):
    found = answer(capsys, "rules", "check", CUSTOM, "--mesh", "2", "--examples", "1")
    assert found["ok"] and not found["undeclared"]
    places = {entry["op"]: entry["place"] for entry in found["judged"]}
    assert "custom_op.py" in places["fxpartest.gated.default"]


def test_what_cannot_be_checked(capsys):
    load_model_source(CUSTOM)
    assert "no such op has a rule" in said(capsys, "rules", "check", "no_such_op")
    assert "no example calls" in said(capsys, "rules", "check", "fxpartest::gated")
    for arguments in ([], ["--all", "mm"], [CUSTOM, "mm"], [CUSTOM, "--jobs", "2"]):
        with pytest.raises(SystemExit) as caught:
            main(["rules", "check", *arguments])
        assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert "give one MODEL, or OPs, or --all" in shown and "--jobs is for OPs and --all" in shown
