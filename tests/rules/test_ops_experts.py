"""fxpar::experts against a loop over experts in autograd ops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.rules.ops import experts as module

torch.set_num_threads(1)


def reference(x, index, weight, up, down, act, gated):
    """Every token through every one of its experts, one product at a time."""
    function = module.ACTIVATIONS[act][0]
    out = x * 0.0
    for token in range(index.shape[0]):
        for slot in range(index.shape[1]):
            expert = int(index[token, slot])
            if not 0 <= expert < up.shape[0]:
                continue
            pre = up[expert] @ x[token]
            if gated:
                gate, rest = pre.chunk(2)
                hidden = function(gate) * rest
            else:
                hidden = function(pre)
            out = out.index_add(0, torch.tensor([token]), (weight[token, slot] * (down[expert] @ hidden))[None])
    return out


def drawn(data, dtype=torch.float64):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    tokens, slots, held = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    width, hidden, gated = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    tensors = [
        torch.randn(tokens, width, dtype=dtype),
        torch.randint(held + 1, (tokens, slots)),  # one past the last: of no expert, as with expert parallel sentinels
        torch.rand(tokens, slots, dtype=dtype),
        torch.randn(held, hidden * (2 if gated else 1), width, dtype=dtype),
        torch.randn(held, width, hidden, dtype=dtype),
    ]
    return tensors, data.draw(st.sampled_from(sorted(module.ACTIVATIONS))), gated


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_forward_and_backward(data):
    tensors, act, gated = drawn(data)
    results = []
    for function in (
        lambda *t: torch.ops.fxpar.experts(*t, act, gated, t[3].shape[0], ()),
        lambda *t: reference(*t, act, gated),
    ):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        out = function(*leaves)
        torch.manual_seed(0)
        (out * torch.randn_like(out)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=1e-10, atol=1e-12)


@given(st.data())
def test_the_experts_of_all_ranks_add_up(data):
    (x, index, weight, up, down), act, gated = drawn(data)
    whole = torch.ops.fxpar.experts(x, index, weight, up, down, act, gated, up.shape[0], ())
    cut = data.draw(st.integers(0, up.shape[0]))
    parts = [
        torch.ops.fxpar.experts(
            x, index, weight, up[a:b], down[a:b], act, gated, up.shape[0], [up.shape[0], a, b - a]
        )
        for a, b in ((0, cut), (cut, up.shape[0]))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-10, atol=1e-12)


def test_only_own_rows_are_sorted():
    index = torch.tensor([[3, 0], [2, 3], [1, 2]])
    mine = module.routed(index, 2, [4, 2, 2])  # holds experts 2 and 3
    assert mine.counts == (2, 2)
    assert mine.slots.tolist() == [2, 5, 0, 3] and mine.tokens.tolist() == [1, 2, 0, 1]
    assert mine.place.tolist() == [[2, 4], [0, 3], [4, 1]]


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped products")
def test_the_grouped_kernel_is_called_as_it_wants(monkeypatch):
    """The kernel of GPUs also runs on CPUs: its operands' order and its offsets are right."""
    torch.manual_seed(0)
    counts = (3, 0, 5)
    x, grad, weight = torch.randn(8, 16), torch.randn(8, 24), torch.randn(3, 24, 16)
    x, grad, weight = (t.to(torch.bfloat16) for t in (x, grad, weight))
    plain = [module.product(x, weight, counts), module.product_backward(grad, weight, counts),
             module.weight_gradient(grad, x, counts)]
    monkeypatch.setattr(module, "_fused", lambda *_: True)
    fused = [module.product(x, weight, counts), module.product_backward(grad, weight, counts),
             module.weight_gradient(grad, x, counts)]
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)
