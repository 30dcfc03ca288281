"""Predicted beside measured runs: rows become what they say, what cannot be said is listed, ranks are counted right."""

import csv
import io
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import validate_costs as validate

COLUMNS = ("id", "source", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "global_batch",
           "micro_batch", "precision", "gpu", "gpus", "gpus_per_node", "tp", "pp", "vpp", "dp", "cp", "ep",
           "zero_stage", "recompute", "step_s")  # fmt: skip
SMALL = dict(zip(COLUMNS, ("A-1", "made up", "GPT-64x2", "2", "64", "4", "4", "256", "128", "32", "8", "2", "fp16",
                           "A100-SXM4-80GB", "4", "4", "1", "1", "1", "4", "1", "", "0", "full", "0.5"), strict=True))


def row(**changes):
    return {**SMALL, **{key: str(value) for key, value in changes.items()}}


@pytest.mark.parametrize("changes", [
    {}, dict(tp=2, dp=2), dict(pp=2, dp=2), dict(zero_stage=3), dict(recompute="none", micro_batch=1),
    dict(precision="bf16/PURE"),
])
def test_rows_are_built_and_simulated(changes):
    found = validate.compare(row(**changes))
    assert found.predicted > 0 and found.memory > 0 and found.measured == 0.5


def test_more_work_takes_longer():
    times = [validate.compare(row(**c)).predicted for c in ({}, dict(recompute="none"))]
    assert times[0] > times[1]


@pytest.mark.parametrize(("changes", "why"), [
    (dict(gpu="V100-SXM2-16GB"), "preset"), (dict(cp=2), "cp = 2"), (dict(dp=2), "ranks on 4 GPUs"),
    (dict(precision="tf32"), "precision tf32"), (dict(model="ResNet-50 v1.5"), "no configuration"),
    (dict(micro_batch=3), "microbatches of 3"), (dict(recompute="some"), "recomputation"), (dict(step_s=""), "no step"),
])
def test_what_cannot_be_expressed_says_why(changes, why):
    with pytest.raises(validate.Inexpressible, match=why):
        validate.compare(row(**changes))


def test_every_row_is_in_the_report(tmp_path, capsys):
    rows = [row(id="A-1"), row(id="A-2", micro_batch=1), row(id="A-3", gpu="unknown")]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    (tmp_path / "runs.csv").write_text(text.getvalue())
    assert validate.main([str(tmp_path / "runs.csv"), "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert "2 rows" in said and "1 groups: tau" in said and "not expressed, 1 rows" in said and "A-3" in said


@given(st.lists(st.integers(0, 20), min_size=2, max_size=9, unique=True), st.data())
def test_kendall_is_what_pairs_say(measured, data):
    predicted = data.draw(st.lists(st.integers(0, 20), min_size=len(measured), max_size=len(measured)))
    pairs = list(zip(predicted, measured, strict=True))
    signs = [((p > q) - (p < q)) * ((m > n) - (m < n)) for (p, m), (q, n) in itertools.combinations(pairs, 2)]
    assert validate.kendall(pairs) == pytest.approx(sum(signs) / len(signs))
    assert validate.kendall([(m, m) for m in measured]) == 1.0
    assert validate.kendall([(-m, m) for m in measured]) == -1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.sampled_from([0.5, 0.9, 0.95, 1.0]))
def test_a_quantile_has_its_share_at_or_below(values, share):
    found = validate.quantile(values, share)
    assert found in values and sum(v <= found for v in values) >= share * len(values) - 1e-9


def test_the_product_reads_no_training_runs():
    root = Path(__file__).resolve().parents[2]
    for folder in ("fxpar", "plans", "solver", "runtime"):
        for path in (root / folder).rglob("*"):
            if path.suffix in (".py", ".toml", ".csv"):
                assert "training.csv" not in path.read_text(), path
