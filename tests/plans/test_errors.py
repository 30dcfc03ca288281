import pickle

import pytest

from fxpar.plans.errors import (
    CaptureError,
    FxparError,
    FxparErrors,
    Infeasible,
    PlanFileError,
    PlanMismatch,
    UnsupportedError,
    collect_errors,
)

FOUR_PARTS = dict(what="it is wrong", where="model.py:3", numbers=("3 of 4", "5 of 6"), way_out="do the other thing")


def test_renders_what_where_numbers_and_way_out_in_order():
    assert str(FxparError(**FOUR_PARTS)) == (
        "fxpar: it is wrong\n  model.py:3\n  3 of 4\n  5 of 6\n  do the other thing"
    )
    assert str(FxparError("it is wrong")) == "fxpar: it is wrong"
    assert str(FxparError("it is wrong", numbers="one\ntwo")) == "fxpar: it is wrong\n  one\n  two"


@pytest.mark.parametrize(
    "kind", [FxparError, PlanFileError, PlanMismatch, CaptureError, Infeasible, UnsupportedError]
)
def test_survives_the_way_between_processes(kind):
    error = kind(**FOUR_PARTS)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind and str(back) == str(error) and back.as_dict() == error.as_dict()


def test_several_survive_the_way_between_processes():
    errors = FxparErrors([FxparError("a"), CaptureError("b", "here")])
    back = pickle.loads(pickle.dumps(errors))
    assert str(back) == str(errors) == "fxpar: a\nfxpar: b\n  here"
    assert [type(error) for error in back.errors] == [FxparError, CaptureError]


def test_collects_all_before_raising():
    with pytest.raises(FxparErrors) as caught:
        with collect_errors() as errors:
            for name in ("a", "b", "a"):
                with errors.catching():
                    raise CaptureError(f"{name} is wrong")
            raise FxparErrors([FxparError("c is wrong"), FxparError("a is wrong")])
    assert [error.what for error in caught.value.errors] == ["a is wrong", "b is wrong", "c is wrong"]


def test_one_error_is_raised_as_itself_and_none_as_nothing():
    with collect_errors() as errors:
        assert errors.errors == ()
    with pytest.raises(Infeasible):
        with collect_errors() as errors:
            errors.add(Infeasible("too big"))


def test_other_exceptions_pass_through():
    with pytest.raises(ZeroDivisionError):
        with collect_errors() as errors:
            errors.add(FxparError("a"))
            raise ZeroDivisionError
