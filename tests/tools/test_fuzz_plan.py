"""The fuzzer finds what it plants, and nothing in a plan of this version."""

import random

from hypothesis import given
from hypothesis import strategies as st

from fxpar.plans.codec import encode
from tests.compiled import mlp_plan
from tools import fuzz_plan


def test_a_short_run_finds_nothing(tmp_path, capsys):
    assert fuzz_plan.fuzz([mlp_plan("2"), mlp_plan("dp=2,tp=2")], 4.0, 5, tmp_path / "found") == 0
    said = capsys.readouterr().out
    assert " refused" in said and " taken" in said and not (tmp_path / "found").exists()


def test_a_finding_is_kept_and_told(tmp_path, capsys, monkeypatch):
    def broken(data: bytes, where: str = "") -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(fuzz_plan, "decode", broken)
    assert fuzz_plan.fuzz([mlp_plan("2")], 0.5, 0, tmp_path / "found") == 1
    assert "planted" in capsys.readouterr().out
    (kept,) = (tmp_path / "found").iterdir()
    assert kept.read_bytes()


@given(st.integers(0, 10**6))
def test_the_same_seed_damages_the_same_way(seed):
    data = encode(mlp_plan("2"))
    once, again = (fuzz_plan.damaged_bytes(data, random.Random(seed)) for _ in range(2))
    assert once == again
    payload = {"a": [1, "x", {"b": [None]}], "c": {"d": 2.5}}
    before = repr(payload)
    parts = [fuzz_plan.damaged_parts(payload, random.Random(seed)) for _ in range(2)]
    assert repr(parts[0]) == repr(parts[1]) and repr(payload) == before


def test_a_file_given_by_path_is_used(tmp_path, capsys):
    path = tmp_path / "plan.msgpack"
    path.write_bytes(encode(mlp_plan("2")))
    assert fuzz_plan.main([str(path), "--seconds", "0.5", "--keep", str(tmp_path / "found")]) == 0
    assert "files:" in capsys.readouterr().out
