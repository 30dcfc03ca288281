"""What cannot be captured is refused in the user's terms."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.capture import capture
from fxpar.plans.errors import CaptureError
from tests.capture.models import numbers


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(4, 4)


class Branch(Base):
    def forward(self, x):
        if x.mean() > 0:
            return self.f(x)
        return -self.f(x)


class Selects(Base):
    def forward(self, x):
        return self.f(x[x[:, 0] > 0])


class ReadsNumber(Base):
    def forward(self, x):
        return self.f(x) * x.max().item()


class HasNoShapeFunction(Base):
    def forward(self, x):
        return self.f(torch.linalg.lstsq(x, x)[0])


class Breaks(Base):
    def forward(self, x):
        x.numpy().astype(object)
        return self.f(x)


class Permutes(Base):
    def forward(self, x):
        return self.f(x)[torch.randperm(3)]


class WritesInput(Base):
    def forward(self, x):
        x.add_(1.0)
        return self.f(x)


class Large(Base):
    def __init__(self):
        super().__init__()
        self.table = torch.zeros(600_000)

    def forward(self, x):
        return self.f(x) + self.table[:4]


def mean_of(output, inputs):
    return output.mean()


CASES = [
    (Branch, "data-dependent", "test_refusals.py:21 in forward"),
    (Selects, "data-dependent", "in forward"),
    (Selects, "aten.nonzero.default gives a shape that depends on values", "in forward"),
    (ReadsNumber, "a number is read off a tensor", "in forward"),
    (HasNoShapeFunction, "aten.linalg_lstsq.default has a data-dependent shape, or one", "in forward"),
    (Breaks, "cannot be traced", "test_refusals.py:43 in forward"),
    (Permutes, "randperm", "test_refusals.py:49 in forward"),
    (WritesInput, "writes in place to one of its inputs", ""),
    (Large, "table", "2400000 bytes"),
]


@pytest.mark.parametrize(("model", "what", "where"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_refused_by_name_and_line(model, what, where):
    with pytest.raises(CaptureError) as caught:
        capture(model(), (numbers(3, 4),), {}, loss=mean_of)
    text = str(caught.value)
    assert what in text and where in text
    assert caught.value.way_out


def test_data_branch_on_a_meta_model():
    with torch.device("meta"):
        model = Branch()
    with pytest.raises(CaptureError, match="data-dependent"):
        capture(model, (torch.empty(3, 4, device="meta"),), {}, loss=mean_of)


def test_sparse_gradients_name_the_module():
    model = nn.ModuleDict({"emb": nn.Embedding(5, 4, sparse=True)})
    with pytest.raises(CaptureError, match="sparse.*emb"):
        capture(model, (torch.tensor([1]),), {}, loss=mean_of)


def test_arguments_that_do_not_fit():
    with pytest.raises(CaptureError, match="do not fit"):
        capture(Base(), (numbers(3, 4),), {"wrong": 1}, loss=mean_of)


class Tells(Base):
    def forward(self, x):
        return {"y": self.f(x)}


def test_missing_and_wrong_losses():
    with pytest.raises(CaptureError, match="no loss"):
        capture(Tells(), (numbers(3, 4),), {})
    with pytest.raises(CaptureError, match="not a scalar") as caught:
        capture(Tells(), (numbers(3, 4),), {}, loss=lambda output, inputs: output["y"].sum(0))
    assert "[4]" in str(caught.value)
    frozen = Tells().requires_grad_(False)
    with pytest.raises(CaptureError, match="gradient"):
        capture(frozen, (numbers(3, 4),), {}, loss=lambda output, inputs: output["y"].mean())


def hooked(factor):
    """A model whose backward hook dynamo refuses and export drops."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[1].register_full_backward_hook(lambda module, given, gradients: tuple(g * factor for g in given))
    return model


def test_dropped_backward_hook_is_found():
    with pytest.raises(CaptureError, match="differs from eager") as caught:
        capture(hooked(2.0), (numbers(3, 4),), {}, loss=mean_of)
    assert "0.weight" in str(caught.value)


def test_harmless_backward_hook_is_captured():
    program = capture(hooked(1.0), (numbers(3, 4),), {}, loss=mean_of)
    assert [output.kind for output in program.outputs].count("gradient") == 4


def test_meta_model_refuses_the_fallback():
    model = hooked(2.0).to("meta")
    with pytest.raises(CaptureError, match="cannot be compared with eager"):
        capture(model, (torch.empty(3, 4, device="meta"),), {}, loss=mean_of)


def test_model_is_restored_after_a_refusal():
    model = Branch()
    weight = model.f.weight
    with pytest.raises(CaptureError):
        capture(model, (numbers(3, 4),), {}, loss=mean_of)
    assert model.f.weight is weight
    F.mse_loss(model(numbers(3, 4)), torch.zeros(3, 4)).backward()
    assert weight.grad is not None
