"""Every ``F.scaled_dot_product_attention`` of a captured graph becomes our whole attention op.

Before the joint trace, because torch would otherwise choose a kernel of the machine that captures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxpar.capture.adapter import nested_graphs
from fxpar.rules.ops.stateless import whole_geometry

SDPA = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten.scaled_dot_product_attention,
)


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The signature of F.scaled_dot_product_attention; any number of leading dims becomes (batch, heads)."""
    lead = query.shape[:-2]
    if len(lead) < 2:
        query, key, value = (t.reshape(*[1] * (4 - t.dim()), *t.shape) for t in (query, key, value))
    elif len(lead) > 2:
        query, key, value = (
            t.expand(*lead[:-1], *t.shape[-3:]).reshape(math.prod(lead[:-1]), *t.shape[-3:])
            for t in (query, key, value)
        )
    batch = max(query.shape[0], key.shape[0], value.shape[0])
    heads = query.shape[1] if enable_gqa else max(query.shape[1], key.shape[1], value.shape[1])
    query = query.expand(batch, heads, *query.shape[2:])
    if enable_gqa:
        groups = max(key.shape[1], value.shape[1])
        key, value = (t.expand(batch, groups, *t.shape[2:]) for t in (key, value))
    else:
        key, value = (t.expand(batch, heads, *t.shape[2:]) for t in (key, value))
    if attn_mask is not None:
        extra = attn_mask.shape[:-2]
        if len(extra) > 2:
            attn_mask = attn_mask.expand(*lead[:-1], *attn_mask.shape[-3:])
            attn_mask = attn_mask.reshape(math.prod(lead[:-1]), *attn_mask.shape[-3:])
        elif len(lead) < 2 or len(extra) < 2:
            attn_mask = attn_mask.reshape(*[1] * (4 - attn_mask.dim()), *attn_mask.shape)
    geometry = whole_geometry((batch, heads, query.shape[2], key.shape[2]))
    out, _ = torch.ops.fxpar.attention(
        query, key, value, attn_mask, None, float(dropout_p), is_causal, scale, enable_gqa, 0, geometry, ()
    )
    if len(lead) == 2:
        return out
    return out.reshape(*lead, *out.shape[-2:])


@contextmanager
def attention_intercepted() -> Iterator[None]:
    """For functions that stay whole in the captured graph and call attention themselves (nn.MultiheadAttention)."""
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attention_call
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def replace_attention(graph_module: fx.GraphModule) -> None:
    """Retarget the attention calls of the graph and its regions, in place."""
    for region in nested_graphs(graph_module):
        changed = False
        for node in region.graph.nodes:
            if node.op == "call_function" and node.target in SDPA:
                node.target = attention_call
                changed = True
        if changed:
            region.recompile()
