"""The float64 reference: what torch has no float64 kernel for is computed from ops that have one."""

import pytest
import torch
from torch.nn.functional import grouped_mm

from fxpar.reference import computing_in, grouped_product

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
