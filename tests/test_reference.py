"""The float64 reference: what torch has no float64 kernel for is computed from ops that have one."""

import pytest
import torch
from torch.nn.functional import grouped_mm

from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.plans.errors import UnsupportedError
from fxpar.reference import computing_in, grouped_product
from fxpar.verify import verify_plan

EXPERTS = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16).bfloat16())
        self.register_buffer("ends", torch.tensor([4, 4, 16], dtype=torch.int32))

    def forward(self, x):
        return nn.functional.grouped_mm(x.bfloat16(), self.weight, offs=self.ends).float().square().mean()


build = Experts


def example_inputs():
    return (torch.arange(128.0).reshape(16, 8).cos(),), {}
"""

OFFSETS = torch.tensor([4, 4, 16], dtype=torch.int32)


@pytest.mark.parametrize(
    ("a", "b", "offsets"),
    [((16, 8), (3, 8, 12), OFFSETS), ((3, 8, 16), (3, 16, 4), None), ((8, 16), (16, 12), OFFSETS),
     ((3, 8, 4), (4, 16), OFFSETS)],
)
def test_grouped_product_is_torchs(a, b, offsets):
    torch.manual_seed(0)
    left, right = torch.randn(a), torch.randn(b)
    torch.testing.assert_close(grouped_product(left, right, offsets), grouped_mm(left, right, offs=offsets))


def test_experts_have_gradients_in_float64():
    torch.manual_seed(0)
    rows, experts = torch.randn(16, 8, requires_grad=True), torch.randn(3, 8, 12, requires_grad=True)
    grouped_mm(rows, experts, offs=OFFSETS).square().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (rows, experts)]
    with computing_in(torch.float64):
        grouped_mm(*wide, offs=OFFSETS).square().sum().backward()
    for narrow, double in zip((rows, experts), wide, strict=True):
        torch.testing.assert_close(narrow.grad, double.grad.float())


def test_experts_in_bfloat16_are_compared_as_they_are_and_refused_in_float64(model_file):
    source = load_model_source(model_file(EXPERTS))
    plan = compile_model(source, mesh="2", random_choices=0).plan
    assert verify_plan(plan, source, dtype="f32").ok
    with pytest.raises(UnsupportedError, match="no float64 kernel for aten._grouped_mm.default") as refused:
        verify_plan(plan, source, dtype="f64")
    assert refused.value.way_out == "--dtype f32"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_way_to_ask_for_less_than_double_is_answered_in_double(dtype):
    x = torch.randn(3, dtype=torch.float64)
    with computing_in(torch.float64):
        for same in (x.to(dtype), x.to("cpu", dtype), x.type(dtype), x.type(dtype=dtype), x.to(dtype=dtype)):
            assert same.dtype is torch.float64 and same.equal(x)
        assert x.type() == "torch.DoubleTensor" and x.type(torch.int64).dtype is torch.int64
