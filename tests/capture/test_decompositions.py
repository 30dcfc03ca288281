"""Every op taken apart gives what the whole op gives, on drawn shapes, in double precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fxpar.rules.ops  # noqa: F401  registers fxpar::...
from fxpar.capture.decompositions import TABLE

torch.set_num_threads(1)
aten = torch.ops.aten


def agree(op, *args, outputs=None, **kwargs):
    """The table's function against torch's kernel."""
    want, got = op(*args, **kwargs), TABLE[op](*args, **kwargs)
    want, got = ((x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (want, got))
    assert len(want) == len(got)
    for index, (one, two) in enumerate(zip(got, want, strict=True)):
        if outputs is not None and index not in outputs:
            continue
        if one is None or two is None:
            assert one is two
            continue
        torch.testing.assert_close(one, two, equal_nan=True)


def doubles(*shape):
    return torch.randn(shape, dtype=torch.float64)


@st.composite
def tensors(draw, low=0, high=4, least=1):
    torch.manual_seed(draw(st.integers(0, 1000)))
    return doubles(*draw(st.lists(st.integers(least, 4), min_size=low, max_size=high)))


@given(tensors(low=1), st.data())
def test_mean_and_variance(x, data):
    dims = data.draw(st.lists(st.integers(-x.dim(), x.dim() - 1), unique_by=lambda d: d % x.dim()))
    keepdim = data.draw(st.booleans())
    correction = data.draw(st.sampled_from([None, 0, 1]))
    agree(aten.mean.dim, x, dims, keepdim)
    agree(aten.mean.default, x)
    chosen = dims or None
    for op in (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction):
        count = torch.ones_like(x).sum(chosen).flatten()[0]
        if count > 1 or correction == 0:
            agree(op, x, chosen, correction=correction, keepdim=keepdim)


def test_mean_of_low_precision_is_summed_in_single():
    x = torch.full((4096,), 3.0, dtype=torch.bfloat16)
    assert TABLE[aten.mean.default](x) == 3.0
    agree(aten.mean.default, torch.arange(5), dtype=torch.float32)


@given(tensors(), st.integers(0, 2), st.sampled_from([0.3, 1.0]))
def test_pointwise_losses(x, reduction, width):
    target = torch.randn_like(x) * 0.7 + x
    grad = torch.randn_like(x) if reduction == 0 else doubles()
    agree(aten.mse_loss.default, x, target, reduction)
    agree(aten.mse_loss_backward.default, grad, x, target, reduction)
    agree(aten.smooth_l1_loss.default, x, target, reduction, width)
    agree(aten.smooth_l1_loss_backward.default, grad, x, target, reduction, width)
    agree(aten.huber_loss.default, x, target, reduction, width)
    agree(aten.huber_loss_backward.default, grad, x, target, reduction, width)


@given(tensors(low=1), st.integers(0, 2), st.booleans(), st.booleans())
def test_binary_cross_entropy(x, reduction, weighted, positive):
    target = torch.rand_like(x)
    weight = torch.rand_like(x) if weighted else None
    grad = torch.randn_like(x) if reduction == 0 else doubles()
    chance = torch.sigmoid(x)
    agree(aten.binary_cross_entropy.default, chance, target, weight, reduction)
    agree(aten.binary_cross_entropy.default, chance.round(), target.round(), weight, reduction)
    agree(aten.binary_cross_entropy_backward.default, grad, chance, target, weight, reduction)
    pos_weight = torch.rand(x.shape[-1], dtype=torch.float64) if positive else None
    agree(aten.binary_cross_entropy_with_logits.default, x * 50, target, weight, pos_weight, reduction)


@given(st.data())
def test_nll_loss(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    classes, plane = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    single = not plane and data.draw(st.booleans())
    lead = [] if single else [data.draw(st.integers(1, 4))]
    rest = [data.draw(st.integers(1, 3)) for _ in range(2)] if plane else []
    x = doubles(*lead, classes, *rest)
    ignore_index = data.draw(st.sampled_from([-100, 0, classes - 1]))
    target = torch.randint(0, classes, (*lead, *rest))
    target = torch.where(torch.rand(target.shape) < 0.3, ignore_index, target)
    weight = torch.rand(classes, dtype=torch.float64) if data.draw(st.booleans()) else None
    reduction = data.draw(st.integers(0, 2))
    kind = "nll_loss2d" if plane else "nll_loss"
    forward, backward = (getattr(aten, f"{kind}_{side}").default for side in ("forward", "backward"))
    agree(forward, x, target, weight, reduction, ignore_index, outputs=(0,) if reduction == 0 else (0, 1))
    value, total = forward(x, target, weight, reduction, ignore_index)
    if reduction == 1 and total == 0:
        return  # 0/0: torch's backward gives 0 there, and eager's loss is nan
    agree(backward, torch.randn_like(value), x, target, weight, reduction, ignore_index, total)


@given(st.data())
def test_batch_norm(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    channels = data.draw(st.integers(1, 4))
    shape = [data.draw(st.integers(2, 4)), channels, *data.draw(st.lists(st.integers(1, 3), max_size=3))]
    x = doubles(*shape) * 2 + 1
    affine, training = data.draw(st.booleans()), data.draw(st.booleans())
    weight, bias = (doubles(channels), doubles(channels)) if affine else (None, None)
    mean, var = doubles(channels), torch.rand(channels, dtype=torch.float64) + 0.5
    agree(aten._native_batch_norm_legit_functional.default, x, weight, bias, mean, var, training, 0.3, 1e-5)
    agree(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, 0.1, 1e-5)
    agree(aten._native_batch_norm_legit_no_training.default, x, weight, bias, mean, var, 0.1, 1e-5)
    saved = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)[1:]
    wanted = [True, affine, affine]
    args = (doubles(*shape), x, weight, mean, var, *saved, training, 1e-5, wanted)
    agree(aten.native_batch_norm_backward.default, *args, outputs=[i for i in range(3) if wanted[i]])


@given(st.data())
def test_group_norm(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    n, groups, width = (data.draw(st.integers(1, 3)) for _ in range(3))
    rest = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    c, hxw = groups * width, int(torch.tensor(rest).prod())
    x = doubles(n, c, *rest)
    weight, bias = (doubles(c), doubles(c)) if data.draw(st.booleans()) else (None, None)
    agree(aten.native_group_norm.default, x, weight, bias, n, c, hxw, groups, 1e-5)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, n, c, hxw, groups, 1e-5)
    wanted = [True, weight is not None, weight is not None]
    args = (doubles(n, c, *rest), x, mean, rstd, weight, n, c, hxw, groups, wanted)
    agree(aten.native_group_norm_backward.default, *args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype(dtype):
    x = torch.randn(4, 6, 5).to(dtype)
    out, mean, rstd = TABLE[aten.native_group_norm.default](x, None, None, 4, 6, 5, 2, 1e-5)
    assert (out.dtype, mean.dtype, rstd.dtype) == (dtype,) * 3
    loss = TABLE[aten.mse_loss.default](x, x + 1, 1)
    assert loss.dtype == dtype and loss == 1


@given(tensors(low=2), st.data())
def test_weight_norm(v, data):
    dim = data.draw(st.sampled_from([0, v.dim() - 1]))
    shape = [n if d == dim else 1 for d, n in enumerate(v.shape)]
    g, grad = doubles(*shape), torch.randn_like(v)
    agree(aten._weight_norm_interface.default, v, g, dim)
    norms = aten._weight_norm_interface(v, g, dim)[1]
    agree(aten._weight_norm_interface_backward.default, grad, v, g, norms, dim)


@given(tensors(low=1), st.data())
def test_log_softmax(x, data):
    dim = data.draw(st.integers(-x.dim(), x.dim() - 1))
    agree(aten._log_softmax.default, x, dim, False)
    output = x.log_softmax(dim)
    agree(aten._log_softmax_backward_data.default, torch.randn_like(x), output, dim, x.dtype)
