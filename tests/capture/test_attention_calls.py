"""Attention calls of every rank and mask shape become the whole op with the same result."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxpar.capture.attention_calls import attention_call, attention_intercepted, replace_attention

CASES = [
    ((5, 4), (6, 4), None),
    ((3, 5, 4), (3, 6, 4), None),
    ((3, 5, 4), (3, 6, 4), (5, 6)),
    ((3, 5, 4), (3, 6, 4), (3, 1, 6)),
    ((2, 3, 5, 4), (2, 3, 6, 4), (5, 6)),
    ((2, 3, 5, 4), (2, 3, 6, 4), (3, 5, 6)),
    ((2, 3, 5, 4), (2, 3, 6, 4), (2, 1, 1, 6)),
    ((2, 3, 5, 4), (1, 1, 6, 4), None),
    ((2, 2, 3, 5, 4), (2, 2, 3, 6, 4), (5, 6)),
    ((2, 2, 3, 5, 4), (2, 2, 3, 6, 4), (2, 1, 3, 5, 6)),
]


@pytest.mark.parametrize(("query", "key", "mask"), CASES)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_every_rank(query, key, mask, kind):
    torch.manual_seed(0)
    q, k, v = torch.randn(query), torch.randn(key), torch.randn(key)
    m = None if mask is None else (torch.randn(mask) if kind == torch.float32 else torch.rand(mask) < 0.7)
    torch.testing.assert_close(attention_call(q, k, v, m), F.scaled_dot_product_attention(q, k, v, m))


def test_grouped_queries_causal_and_scale():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    options = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    torch.testing.assert_close(attention_call(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options))


class Attends(nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, None, 0.0, True)


def test_graph_calls_are_replaced():
    traced = fx.symbolic_trace(Attends())
    replace_attention(traced)
    assert attention_call in {node.target for node in traced.graph.nodes}
    q = torch.randn(2, 3, 5, 4)
    torch.testing.assert_close(traced(q, q, q), Attends()(q, q, q))


def test_interception_ends():
    original = F.scaled_dot_product_attention
    with attention_intercepted():
        assert F.scaled_dot_product_attention is attention_call
    assert F.scaled_dot_product_attention is original
