"""Tiny transformers architectures: captured, compiled and equal to the eager model. All of them: pytest -m slow."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from tests.zoo_models import ARCHITECTURES, BY_NAME
from tools.zoo import Verdict, Wanted, judge, kept_verdicts, markdown

QUICK = ("distilbert", "gpt_neo", "convnext")
REFUSED = dict.fromkeys(("led", "switch_transformers", "vilt", "llava"), "a data-dependent branch")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_names_are_distinct_and_many():
    assert len(BY_NAME) == len(ARCHITECTURES) >= 44


@pytest.mark.parametrize("name", QUICK)
def test_random_plan_is_equal_to_eager(name):
    verdict = judge(BY_NAME[name], Wanted("2x2", randoms=1, search=False))
    assert verdict.ok, verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", [a.name for a in ARCHITECTURES])
def test_best_and_random_plans_are_equal_to_eager(name, repository, tmp_path, request):
    if "slow" not in request.config.getoption("markexpr"):
        pytest.skip("takes an hour for all: pytest -m slow")
    out = tmp_path / "verdict.json"
    command = [sys.executable, str(repository / "tools" / "zoo.py"), "--only", name, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    verdict = json.loads(out.read_text())[0]
    if name in REFUSED:
        assert REFUSED[name] in verdict["reason"]
    else:
        assert done.returncode == 0, verdict["reason"]


def test_table_says_how_far_each_came():
    verdicts = [
        Verdict("one", "encoder", ("captured", "compiled", "verified"), "", 1.0, 300, 1e-15),
        Verdict("two", "vision", ("captured",), "fxpar: no rule | here: see\n  at line 3\n  x = y\n  declare it", 1.0),
        Verdict("three", "encoder", ("captured", "compiled", "verified"), "", 1.0, 300, 1e-15),
    ]
    table = markdown(verdicts, Wanted("2x2", randoms=2, search=True))
    assert table.startswith("2 of 3 transformers") and "the best plan and 2 random plans" in table
    assert "| encoder (2) | one, three |" in table
    assert "| two | yes | no | no | no rule \\| here; at line 3; x = y |" in table
    assert "-------- --------" in verdicts[1].line()


def test_earlier_verdicts_are_kept(tmp_path):
    out = tmp_path / "zoo.json"
    assert kept_verdicts(str(out)) == [] == kept_verdicts(None)
    kept = Verdict("one", "encoder", ("captured",), "refused", 1.0)
    out.write_text(json.dumps([dataclasses.asdict(kept)]))
    assert kept_verdicts(str(out)) == [kept]
