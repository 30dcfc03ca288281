"""The rule language: names, compounds, broadcasts, what is contracted and what stays whole."""

from __future__ import annotations

import pytest

from fxpar.plans.program import Ref, TensorType
from fxpar.rules.factor_rule import Call, Group, Linear, Slot
from fxpar.rules.parse import parse_side, string_factors


def call(op: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], *more: object) -> Call:
    """A call with float operands of these shapes in the first arguments."""
    args = (*(Ref(i) for i in range(len(inputs))), *more)
    return Call(
        op, args, tuple(TensorType(s, "float32") for s in inputs), tuple(TensorType(s, "float32") for s in outputs)
    )


def product(m: int = 4, k: int = 6, n: int = 8) -> Call:
    return call("aten.mm.default", [(m, k), (k, n)], [(m, n)])


def by_size(groups: tuple[Group, ...]) -> dict[int, Group]:
    return {g.size: g for g in groups}


def test_names_become_loops_and_missing_ones_are_contracted() -> None:
    groups = by_size(string_factors(product(), "m k, k n -> m n").groups)
    assert groups[4] == Group(4, (Slot((0,)), None), (Slot((0,)),), (None,))
    assert groups[6] == Group(6, (Slot((1,)), Slot((0,))), (None,), ("sum",))
    assert groups[8] == Group(8, (None, Slot((1,))), (Slot((1,)),), (None,))


def test_a_name_with_an_exclamation_mark_stays_whole() -> None:
    assert 6 not in by_size(string_factors(product(), "m k!, k n -> m n").groups)


def test_a_loop_of_one_turn_is_none() -> None:
    assert 1 not in by_size(string_factors(product(m=1), "m k, k n -> m n").groups)


@pytest.mark.parametrize("text", ["(a b) k, k n -> (a b) n", "(a b) k, k n -> (a b) n, a"])
def test_the_parts_of_a_compound_must_be_told_somewhere(text: str) -> None:
    with pytest.raises(ValueError, match="cannot tell the parts|does not fit"):
        string_factors(product(), text)


def test_a_compound_learns_its_parts_from_a_later_operand() -> None:
    given = call("aten.mm.default", [(6, 4), (3, 5)], [(2, 5)])
    groups = by_size(string_factors(given, "(g r) k, g n -> r n").groups)
    assert groups[3].inputs == (Slot((0,), 1, 2), Slot((0,)))
    assert groups[2].inputs == (Slot((0,), 3, 1), None)
    assert groups[2].outputs == (Slot((0,)),)


def test_a_name_that_stands_twice_in_an_operand_stays_whole() -> None:
    given = call("aten.mm.default", [(4, 4), (4, 5)], [(4, 5)])
    assert {g.size for g in string_factors(given, "i i, i n -> i n").groups} == {5}


def test_leading_dims_align_from_the_right_and_broadcast() -> None:
    given = call("aten.mul.Tensor", [(2, 3, 4), (3, 1)], [(2, 3, 4)])
    groups = by_size(string_factors(given, "..., ... -> ...").groups)
    assert groups[2].inputs == (Slot((0,)), None)
    assert groups[3].inputs == (Slot((1,)), Slot((0,)))
    assert groups[4].inputs == (Slot((2,)), None)


def test_outputs_wait_only_for_what_they_read() -> None:
    given = call("aten.native_layer_norm.default", [(4, 6)], [(4, 6), (4, 1), (4, 1)])
    given = Call(given.op, (Ref(0), (6,), None, None, 1e-5), given.inputs, given.outputs)
    text = "r d, d, d -> _ d, _ 1, _ 1"
    (rows,) = (g for g in string_factors(given, text, reads=("0", "0", "")).groups if g.size == 4)
    assert rows.contract == ("sum", "sum", None)


def test_addends_are_operands_without_the_contracted_loop() -> None:
    given = Call(
        "aten.addmm.default",
        (Ref(0), Ref(1), Ref(2), 1, 1),
        tuple(TensorType(s, "float32") for s in ((8,), (4, 6), (6, 8))),
        (TensorType((4, 8), "float32"),),
    )
    groups = by_size(string_factors(given, "n, m k, k n -> m n", addends=(0,), linear=("01",)).groups)
    assert groups[6].addends == (0,) and groups[4].addends == () and groups[8].addends == ()


def test_linear_entries_name_outputs_and_vanish_with_their_operands() -> None:
    factors = string_factors(product(), "m k, k n -> m n", linear=("0", "01", "1>0"))
    assert factors.linear == (Linear((0,), (0,)), Linear((0, 1), (0,)), Linear((1,), (0,)))


@pytest.mark.parametrize(
    "text", ["m k -> m n", "m k, k n -> m n, m", "m k b, k n -> m n", "m m2, k n -> m n k", "k m, k n -> m n"]
)
def test_a_text_that_does_not_fit_the_call_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mm"):
        string_factors(product(), text)


def test_compound_marks() -> None:
    ((dim,),) = parse_side("(h! e)")
    assert dim.names == ("h", "e") and dim.whole == (True, False)
