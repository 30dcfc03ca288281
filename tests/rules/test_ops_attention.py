"""fxpar::attention against torch's scaled dot product attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpar.rules.ops  # noqa: F401
from fxpar.rules.ops import attention as module
from fxpar.rules.ops.stateless import keep_mask, whole_geometry

torch.set_num_threads(1)


def reference(q, k, v, mask, is_causal, scale, keep=None):
    """Explicit attention in autograd ops; rows without a key give 0."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return (weights if keep is None else weights * keep) @ v


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_forward_and_backward(data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    b, g, r, e = (data.draw(st.integers(1, 3)) for _ in range(4))
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    f = data.draw(st.sampled_from([e, e + 1]))
    kind = data.draw(st.sampled_from(["none", "bool", "added", "learned", "causal"]))
    p = data.draw(st.sampled_from([0.0, 0.4]))
    scale = data.draw(st.sampled_from([None, 0.3]))
    q = torch.randn(b, g * r, rows, e, dtype=torch.float64, requires_grad=True)
    k = torch.randn(b, g, columns, e, dtype=torch.float64, requires_grad=True)
    v = torch.randn(b, g, columns, f, dtype=torch.float64, requires_grad=True)
    mask = None
    if kind in ("bool", "added", "learned"):
        shape = [data.draw(st.sampled_from([1, n])) for n in (b, g * r, rows, columns)]
        mask = torch.rand(shape) < 0.6
        if kind != "bool":
            mask = torch.randn(shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
            mask.requires_grad_(kind == "learned")
    shape = (b, g * r, rows, columns)
    seed = torch.tensor(3)
    keep = keep_mask(seed, 5, p, whole_geometry(shape), shape, q.device) / (1 - p) if p else None
    places = (whole_geometry(shape), ())
    out, _ = torch.ops.fxpar.attention(q, k, v, mask, seed, p, kind == "causal", scale, r > 1, 5, *places)
    want = reference(q, k, v, mask, kind == "causal", scale, keep)
    torch.testing.assert_close(out, want)
    leaves = [q, k, v] + ([mask] if kind == "learned" else [])
    weight = torch.randn_like(want)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    expected = torch.autograd.grad((want * weight).sum(), leaves)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_and_explicit_paths_agree(dtype, is_causal, monkeypatch):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 17, 8, dtype=dtype) for _ in range(4))
    options = (None, None, 0.0, is_causal, None, False, 0, whole_geometry((2, 4, 17, 17)), ())

    def run():
        out, lse = torch.ops.fxpar.attention(q, k, v, *options)
        rest = torch.ops.fxpar.attention_backward(grad, q, k, v, None, out, lse, *options[1:], False)
        return out, lse, *rest[:3]

    fused = run()
    monkeypatch.setattr(module, "fused_applies", lambda *_: False)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-2
    for one, two in zip(fused, run(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=10 * tolerance)
        assert one.dtype == two.dtype and one.shape == two.shape


def test_equals_torch_with_masked_rows():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 1, 5, 5) < 0.5
    mask[0, 0, 2] = False
    places = (whole_geometry((2, 2, 5, 5)), ())
    out, _ = torch.ops.fxpar.attention(q, k, v, mask, None, 0.0, False, None, False, 0, *places)
    want = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.square().sum(), [q, k, v])
    for one, two in zip(got, torch.autograd.grad(want.square().sum(), [q, k, v]), strict=True):
        torch.testing.assert_close(one, two)
