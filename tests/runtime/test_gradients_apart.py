"""Parameters with the very same gradient still get gradients of their own: in-place work on one leaves the other."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxpar
from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.runtime.step import own_memory

MODEL = """
import torch
from torch import nn

class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.more = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return ((self.left(x) + self.right(x) + self.more) * self.scale).square().mean()

def build():
    return Twins().double()

def example_inputs():
    return (torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4),), {}
"""


def train(model: nn.Module, step, clip) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step()
        clip()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in model.named_parameters()}


def test_equal_gradients_are_clipped_once(model_file):
    source = load_model_source(model_file(MODEL))
    plan = compile_model(source, mesh="1").plan
    gradients = [o.value for o in plan.program.outputs if o.kind == "gradient"]
    assert len(set(gradients)) < len(gradients)  # the program does compute some of them once
    args, _ = source.example_inputs()
    torch.manual_seed(source.seed)
    one = source.build()
    want = train(one, lambda: one(*args).backward(), lambda: nn.utils.clip_grad_norm_(one.parameters(), 0.01))
    torch.manual_seed(source.seed)
    model = fxpar.load(plan, source.build())
    try:
        got = train(model, lambda: model.step(*args), lambda: model.clip_grad_norm_(0.01))
    finally:
        torch.distributed.destroy_process_group()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-12, atol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=6))
def test_no_two_share_an_element(ranges):
    base = torch.arange(12.0)
    used: dict[int, list[tuple[int, int]]] = {}
    before = []
    for start, length, apart in ranges:
        view = (base.clone() if apart else base)[start : start + length]
        before.append((own_memory(view, used), view.clone()))
    for tensor, _ in before:
        tensor.add_(1)
    for tensor, value in before:
        assert torch.equal(tensor, value + 1)
