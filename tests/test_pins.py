"""Pins as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.pins import Pin, Wanted, parse_pin, parse_pins
from fxpar.plans.errors import FxparError
from fxpar.plans.mesh import parse_mesh


@pytest.mark.parametrize(
    ("text", "pattern", "axes", "wanted"),
    [
        ("embed*.weight=tp:Shard(0)", "embed*.weight", ("tp",), (Wanted("shard", 0),)),
        ("embed*.weight = tp:S(-1)", "embed*.weight", ("tp",), (Wanted("shard", -1),)),
        ("a=b.*=tp:Shard(dim=1)", "a=b.*", ("tp",), (Wanted("shard", 1),)),
        ("*.bias=Replicate", "*.bias", (None,), (Wanted("replicate"),)),
        ("*.bias=Replicate()", "*.bias", (None,), (Wanted("replicate"),)),
        ("x=[R, Shard(1)]", "x", (0, 1), (Wanted("replicate"), Wanted("shard", 1))),
        ("up=a1:ffn,a0:batch", "up", ("a1", "a0"), (Wanted("split", name="ffn"), Wanted("split", name="batch"))),
        ("l.*/mm=a0:whole", "l.*/mm", ("a0",), (Wanted("whole"),)),
        ("attention=P", "attention", (None,), (Wanted("partial"),)),
    ],
)
def test_pins_are_read(text, pattern, axes, wanted):
    assert parse_pin(text) == Pin(text, pattern, axes, wanted)


@pytest.mark.parametrize("text", [
    "", "a", "=R", "a=", "a=tp:", "a=:R", "a=R,S(0)", "a=tp:R,tp:S(0)", "a=tp:R,S(0)", "a=[tp:R]", "a=[]", "a=S(x)",
    "a=Shard(1000000)", "a=t p:R", "a=b c", "a=Shard(0", "a" * 2000 + "=R",
])
def test_what_is_no_pin_is_an_error_with_the_way_out(text):
    with pytest.raises(FxparError, match="is not a pin") as caught:
        parse_pin(text)
    assert "write PATTERN=" in caught.value.way_out


def test_all_faults_come_at_once_and_repeated_pins_count_once():
    with pytest.raises(FxparError) as caught:
        parse_pins(["a=R", "b", "c="])
    assert "'b' is not a pin" in str(caught.value) and "'c=' is not a pin" in str(caught.value)
    assert len(parse_pins(["a=R", "a=R"])) == 1


def test_axes_are_found_on_a_mesh():
    mesh = parse_mesh("dp=2,tp=2")
    assert parse_pin("a=tp:R").on(mesh) == {1: Wanted("replicate")}
    assert parse_pin("a=S(0)").on(mesh) == {0: Wanted("shard", 0), 1: Wanted("shard", 0)}
    assert parse_pin("a=[R, S(0)]").on(mesh) == {0: Wanted("replicate"), 1: Wanted("shard", 0)}
    assert parse_pin("a=[R]").on(mesh) is None and parse_pin("a=a0:R").on(mesh) is None


@given(st.text(max_size=30))
def test_any_text_is_a_pin_or_an_error(text):
    try:
        pin = parse_pin(text)
    except FxparError:
        return
    assert len(pin.axes) == len(pin.wanted) >= 1
