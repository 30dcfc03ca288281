"""Names of the leaves of a call."""

import pytest
import torch

from fxpar.capture.call import bind_call
from fxpar.plans.errors import CaptureError

X = torch.zeros(1)


def forward(a, b=None, *rest, c=1.0, **more):
    """A signature with every kind of parameter."""


def test_paths_follow_the_signature():
    call = bind_call(forward, (X, {"k": [X, 2]}, X, (X,)), {"c": 0.5, "d": {"e": X}})
    named = dict(zip(call.paths, call.leaves, strict=True))
    assert list(named) == ["a", "b['k'][0]", "b['k'][1]", "rest[0]", "rest[1][0]", "c", "d['e']"]
    assert call.baked == (("b['k'][1]", "2"), ("c", "0.5"))
    assert call.parameters == ("a", "b", "*rest")
    assert [call.paths[i] for i in call.tensors] == ["a", "b['k'][0]", "rest[0]", "rest[1][0]", "d['e']"]


def test_positional_and_keyword_calls_name_alike():
    assert bind_call(forward, (X, X), {}).paths == bind_call(forward, (), {"a": X, "b": X}).paths


def test_misfit_shows_the_signature():
    with pytest.raises(CaptureError, match="missing a required argument") as caught:
        bind_call(forward, (), {"b": X})
    assert "c=1.0" in str(caught.value)
