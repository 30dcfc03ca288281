"""When two sets of tensors count as equal."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.comparison import Comparison, compare_kind, distance


def rows_of(reference, got, tolerance=1e-6):
    return {row.name: row for row in compare_kind("gradient", reference, got, tolerance)}


@given(st.floats(1e-3, 1e3), st.floats(-30, -1))
def test_a_difference_counts_relative_to_the_largest_entry(scale, exponent):
    reference = torch.tensor([scale, 0.0], dtype=torch.float64)
    apart = scale * 10.0**exponent
    row = rows_of({"w": reference}, {"w": reference + torch.tensor([0.0, apart])})["w"]
    assert row.ok == (row.difference <= 1e-6 * scale) and row.difference == pytest.approx(apart)


def test_rounding_around_zero_is_measured_by_the_other_gradients():
    reference = {"big": torch.ones(2), "zero": torch.zeros(2)}
    assert rows_of(reference, {"big": torch.ones(2), "zero": torch.full((2,), 1e-9)})["zero"].ok
    assert not rows_of(reference, {"big": torch.ones(2), "zero": torch.full((2,), 1e-4)})["zero"].ok


@pytest.mark.parametrize(
    ("got", "problem"),
    [
        (None, "none, the reference has one"),
        (torch.zeros(3), "[3] float32, the reference [2] float32"),
        (torch.zeros(2, dtype=torch.float64), "[2] float64, the reference [2] float32"),
    ],
)
def test_what_cannot_be_subtracted_is_a_problem(got, problem):
    row = rows_of({"w": torch.zeros(2)}, {"w": got})["w"]
    assert not row.ok and row.problem == problem


def test_nones_match_nones_only_and_names_must_be_the_same():
    assert rows_of({"w": None}, {"w": None})["w"].ok
    assert rows_of({"w": None}, {"w": torch.zeros(1)})["w"].problem == "the reference has none"
    assert rows_of({"w": torch.zeros(1)}, {})["w"].problem == "missing"
    assert rows_of({}, {"w": torch.zeros(1)})["w"].problem == "not in the reference"


def test_not_a_number_is_never_close():
    nan, inf = float("nan"), float("inf")
    assert distance(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])) == 0.0
    assert distance(torch.tensor([1.0]), torch.tensor([nan])) == inf
    assert distance(torch.tensor([inf]), torch.tensor([inf])) == 0.0
    assert distance(torch.tensor([inf]), torch.tensor([-inf])) == inf
    assert not rows_of({"w": torch.ones(1)}, {"w": torch.tensor([nan])})["w"].ok


def test_integers_must_be_equal():
    count = torch.tensor(7)
    assert rows_of({"n": count}, {"n": count.clone()})["n"].ok
    assert not rows_of({"n": count}, {"n": count + 1})["n"].ok


def test_the_report_names_the_worst_and_is_plain_data():
    rows = compare_kind("gradient", {"a": torch.ones(2), "b": torch.ones(2)},
                        {"a": torch.ones(2), "b": torch.tensor([1.0, 1.5])}, 1e-4)
    report = Comparison("model on mesh", tuple(rows), ("rank 1: lost",))
    text = report.text()
    assert not report.ok and "gradient b: differs by 5.000e-01" in text and "rank 1: lost" in text
    assert text.endswith("NOT equal")
    facts = json.loads(json.dumps(report.as_dict()))
    assert facts["rows"][0]["name"] == "b" and facts["failures"] == ["rank 1: lost"]


def test_nothing_compared_is_not_equal():
    assert not Comparison("model", ()).ok
