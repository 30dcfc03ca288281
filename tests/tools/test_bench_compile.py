"""The compile benchmark runs the real command and reads its figures."""

from collections import Counter
from types import SimpleNamespace

import pytest

from tools import bench_compile as bench

TINY = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)


def test_rows_are_the_product_of_what_is_asked():
    asked = list(bench.rows(["llama-70b"], ["32x8", "4x8x8"], ["72GiB", "24GiB"]))
    assert [(r.mesh, r.memory) for r in asked] == [
        ("32x8", "72GiB"), ("32x8", "24GiB"), ("4x8x8", "72GiB"), ("4x8x8", "24GiB"),
    ]  # fmt: skip
    assert [r.model for r in bench.rows(["llama-8b"], [], [])] == ["llama-8b"] * 2


def test_the_outer_call_of_a_phase_counts_once(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 7.0])
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    spent: Counter[str] = Counter()

    def nested(depth):
        return depth and run(depth - 1)

    run = bench.timed(nested, "search", spent)
    assert run(2) == 0 and spent["search"] == 7.0


def test_failures_stay_in_the_table():
    row = bench.Row("llama-8b", "8x8:h100", 64)
    text = bench.table([bench.Measured(row, 32, whole=3.0, error="the model does not fit")])
    assert "the model does not fit" in text and len({len(line) for line in text.splitlines()}) == 1


@pytest.mark.slow
def test_a_row_is_measured(monkeypatch):
    tiny = {**bench.CONFIGURATIONS["llama-8b"], **TINY, "num_hidden_layers": 3}
    monkeypatch.setitem(bench.CONFIGURATIONS, "tiny", tiny)
    measured = bench.measure(bench.Row("tiny", "1x2:h100", 2), 250.0)
    assert not measured.error
    assert 0 < measured.capture < measured.whole and 0 < measured.solver < measured.search < measured.whole
    assert measured.plan_bytes > 1000 and measured.step_ns > 0 and measured.peak_rss > 2**26
