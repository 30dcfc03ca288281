"""Generators of calls of ops kept whole: products, attention, norms, embeddings, losses."""

from __future__ import annotations

import math

import torch

from fxpar.rule_examples.draw import Draw, calls
from fxpar.rules.ops.ctc import reached
from fxpar.rules.soundness import Example, example, run_op


@calls("mm")
def product(draw: Draw) -> Example:
    m, k, n = draw.size(1), draw.size(1), draw.size(1)
    return example("mm", draw.real(m, k), draw.real(k, n))


@calls("bmm")
def batched_product(draw: Draw) -> Example:
    b, m, k, n = draw.size(1, 4), draw.size(1), draw.size(1), draw.size(1)
    return example("bmm", draw.real(b, m, k), draw.real(b, k, n))


@calls("mv")
def matrix_vector(draw: Draw) -> Example:
    m, k = draw.size(), draw.size()
    return example("mv", draw.real(m, k), draw.real(k))


@calls("dot")
def dot(draw: Draw) -> Example:
    k = draw.size()
    return example("dot", draw.real(k), draw.real(k))


@calls("addmm")
def added_product(draw: Draw) -> Example:
    m, k, n = draw.size(), draw.size(), draw.size()
    bias = draw.real(*draw.pick((n,), (m, n), (1, n), (m, 1), (1,), ()))
    return example("addmm", bias, draw.real(m, k), draw.real(k, n), beta=draw.pick(1, 0.5), alpha=draw.pick(1, 2))


@calls("baddbmm")
def added_batched_product(draw: Draw) -> Example:
    b, m, k, n = draw.size(2, 4), draw.size(), draw.size(), draw.size()
    bias = draw.real(*draw.pick((n,), (m, n), (b, m, n), (b, 1, 1), (b, 1, n)))
    return example("baddbmm", bias, draw.real(b, m, k), draw.real(b, k, n))


@calls("addmv")
def added_matrix_vector(draw: Draw) -> Example:
    m, k = draw.size(), draw.size()
    return example("addmv", draw.real(m), draw.real(m, k), draw.real(k))


@calls("fxpar::hub")
def hub(draw: Draw) -> Example:
    return example("fxpar::hub", draw.real(*draw.shape()))


# attention and dropout


def whole(*sizes: int) -> list[int]:
    return [n for size in sizes for n in (size, 0, size)]


@calls("fxpar::dropout")
def dropout(draw: Draw) -> Example:
    shape = draw.shape()
    return example("fxpar::dropout", draw.real(*shape), torch.tensor(draw.size(0, 99)), 0.4, 7, whole(*shape))


def attention_call(draw: Draw) -> dict:
    b, q, k, e, f = draw.size(1, 4), draw.size(1, 5), draw.size(1, 5), draw.pick(2, 4), draw.pick(2, 4, 3)
    shared, rep = draw.pick((4, 1), (3, 1), (2, 2), (2, 3), (1, 4), (1, 1))
    h = shared * rep
    p = draw.pick(0.0, 0.3)
    mask = None
    if draw.chance():
        shape = (draw.pick(b, 1), draw.pick(h, 1), draw.pick(q, 1), k)
        mask = draw.real(*shape) if draw.chance(0.7) else draw.mask(*shape)
    return dict(
        q=draw.real(b, h, q, e), k=draw.real(b, shared, k, e), v=draw.real(b, shared, k, f), mask=mask,
        seed=torch.tensor(draw.size(0, 99)) if p else None, dropout_p=p, is_causal=mask is None and draw.chance(),
        scale=draw.pick(None, 0.5), enable_gqa=rep > 1, op_id=5, geometry=whole(b, h, q, k), rows=(),
    )  # fmt: skip


@calls("fxpar::attention")
def attention(draw: Draw) -> Example:
    return example("fxpar::attention", **attention_call(draw))


@calls("fxpar::attention_backward")
def attention_backward(draw: Draw) -> Example:
    call = attention_call(draw)
    forward = example("fxpar::attention", **call)
    out, lse = run_op(forward.op, forward.args, forward.tensors)
    assert out is not None and lse is not None
    needs = call["mask"] is not None and call["mask"].is_floating_point()
    return example(
        "fxpar::attention_backward", grad=draw.real(*out.shape), out=out, lse=lse, mask_needs_grad=needs, **call
    )


# norms


@calls("native_layer_norm")
def layer_norm(draw: Draw) -> Example:
    shape = draw.shape(2, 3)
    kept = list(shape[draw.pick(1, len(shape) - 1) :])
    weight, bias = draw.pick((draw.real(*kept), draw.real(*kept)), (draw.real(*kept), None), (None, None))
    return example("native_layer_norm", draw.real(*shape), kept, weight, bias, 1e-5)


@calls("native_layer_norm_backward")
def layer_norm_backward(draw: Draw) -> Example:
    shape = draw.shape(2, 3)
    rows = draw.pick(1, len(shape) - 1)
    kept = list(shape[rows:])
    moments = (*shape[:rows], *(1 for _ in kept))
    weight, bias = draw.pick((draw.real(*kept), draw.real(*kept)), (draw.real(*kept), None), (None, None))
    return example(
        "native_layer_norm_backward", draw.real(*shape), draw.real(*shape), kept, draw.real(*moments),
        draw.positive(*moments), weight, bias, [draw.chance(0.8), weight is not None, bias is not None],
    )  # fmt: skip


@calls("_fused_rms_norm")
def rms_norm(draw: Draw) -> Example:
    shape = draw.shape(2, 3)
    weight = draw.real(shape[-1]) if draw.chance() else None
    return example("_fused_rms_norm", draw.real(*shape), [shape[-1]], weight, 1e-5)


@calls("native_group_norm")
def group_norm(draw: Draw) -> Example:
    n, groups, per, space = draw.size(1, 4), draw.pick(1, 2, 3, 4), draw.pick(1, 2), draw.pick((3,), (2, 2))
    c = groups * per
    weight, bias = draw.pick((draw.real(c), draw.real(c)), (None, None))
    return example(
        "native_group_norm", draw.real(n, c, *space), weight, bias, n, c, torch.Size(space).numel(), groups, 1e-5
    )


@calls("native_group_norm_backward")
def group_norm_backward(draw: Draw) -> Example:
    n, groups, per, space = draw.size(1, 4), draw.pick(1, 2, 3, 4), draw.pick(1, 2), draw.pick((3,), (2, 2))
    c = groups * per
    weight = draw.real(c) if draw.chance(0.7) else None
    return example(
        "native_group_norm_backward", draw.real(n, c, *space), draw.real(n, c, *space), draw.real(n, groups),
        draw.positive(n, groups), weight, n, c, torch.Size(space).numel(), groups,
        [True, weight is not None, weight is not None],
    )  # fmt: skip


@calls("_weight_norm_interface")
def weight_norm(draw: Draw) -> Example:
    dim = draw.pick(0, 2)
    v = draw.real(4, 3, 5)
    g = draw.real(*(s if d == dim else 1 for d, s in enumerate(v.shape)))
    return example("_weight_norm_interface", v, g, dim)


@calls("_weight_norm_interface_backward")
def weight_norm_backward(draw: Draw) -> Example:
    dim = draw.pick(0, 2)
    v = draw.real(4, 3, 5)
    shape = [s if d == dim else 1 for d, s in enumerate(v.shape)]
    norms = v.square().sum([d for d in range(3) if d != dim], keepdim=True).sqrt()
    return example("_weight_norm_interface_backward", draw.real(4, 3, 5), v, draw.real(*shape), norms, dim)


# embeddings


@calls("embedding")
def embedding(draw: Draw) -> Example:
    rows = draw.size(2, 8)
    return example("embedding", draw.real(rows, draw.size()), draw.below(rows, *draw.shape(1, 2)), draw.pick(-1, 1))


@calls("embedding_dense_backward")
def embedding_backward(draw: Draw) -> Example:
    rows, width = draw.size(2, 8), draw.size()
    ids = draw.below(rows, *draw.shape(1, 2))
    pad = draw.pick(-1, 0, rows - 1)
    return example("embedding_dense_backward", draw.real(*ids.shape, width), ids, rows, pad, draw.chance(0.2))


@calls("_embedding_bag", "_embedding_bag_forward_only")
def bag(draw: Draw, op: str) -> Example:
    rows = draw.size(2, 6)
    return example(op, draw.real(rows, 4), draw.below(rows, 7), torch.tensor([0, 3, 3]), False, draw.pick(0, 1, 2))


@calls("_embedding_bag_dense_backward")
def bag_backward(draw: Draw) -> Example:
    rows, mode = 5, draw.pick(0, 1)
    weight, ids, offsets = draw.real(rows, 4), draw.below(rows, 7), torch.tensor([0, 3, 3])
    out, offset2bag, sizes, largest = torch.ops.aten._embedding_bag(weight, ids, offsets, False, mode)
    if offset2bag.numel() == 0:
        offset2bag = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    return example(
        "_embedding_bag_dense_backward", draw.real(*out.shape), ids, offset2bag, sizes, largest, rows, False, mode, None
    )


@calls("_embedding_bag_backward")
def bag_backward_any(draw: Draw) -> Example:
    rows, mode = 5, draw.pick(0, 1)
    weight, ids, offsets = draw.real(rows, 4), draw.below(rows, 7), torch.tensor([0, 3, 3])
    out, offset2bag, sizes, largest = torch.ops.aten._embedding_bag(weight, ids, offsets, False, mode)
    return example(
        "_embedding_bag_backward", draw.real(*out.shape), ids, offsets, offset2bag, sizes, largest, rows, False, mode,
        False, None,
    )  # fmt: skip


# losses


def class_scores(draw: Draw, space: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    n, c = draw.size(1, 6), draw.size(2, 5)
    target = draw.below(c, n, *space)
    target[draw.mask(*target.shape) & draw.mask(*target.shape)] = -100
    return draw.real(n, c, *space), target, draw.positive(c) if draw.chance() else None


@calls("nll_loss_forward", "nll_loss2d_forward")
def nll(draw: Draw, op: str) -> Example:
    x, target, weight = class_scores(draw, (2, 3) if "2d" in op else ())
    return example(op, x, target, weight, draw.pick(0, 1, 2), -100)


@calls("nll_loss_backward", "nll_loss2d_backward")
def nll_backward(draw: Draw, op: str) -> Example:
    x, target, weight = class_scores(draw, (2, 3) if "2d" in op else ())
    reduction = draw.pick(0, 1, 2)
    grad = draw.real(*target.shape) if reduction == 0 else draw.real()
    return example(op, grad, x, target, weight, reduction, -100, draw.positive())


@calls("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
       "soft_margin_loss")  # fmt: skip
def loss(draw: Draw, op: str) -> Example:
    shape = draw.shape()
    x = draw.unit(*shape) if op == "binary_cross_entropy" else draw.real(*shape)
    return example(op, x, draw.unit(*shape), reduction=draw.pick(0, 1, 2))


@calls("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "binary_cross_entropy_backward",
       "soft_margin_loss_backward")  # fmt: skip
def loss_backward(draw: Draw, op: str) -> Example:
    shape = draw.shape()
    reduction = draw.pick(0, 1, 2)
    grad = draw.real(*shape) if reduction == 0 else draw.real()
    x, y = draw.unit(*shape), draw.unit(*shape)
    more = {"smooth_l1_loss_backward": (0.5,), "huber_loss_backward": (0.5,)}.get(op, ())
    if op == "binary_cross_entropy_backward":
        return example(op, grad, x, y, None, reduction)
    return example(op, grad, x, y, reduction, *more)


def ctc_call(draw: Draw, equal: bool) -> tuple:
    """Log probabilities, targets, lengths (``equal`` ones, or shorter here and there)."""
    t, n, c = 6, draw.size(1, 4), 4
    lengths = torch.full((n,), t), torch.full((n,), 2)
    if not equal:
        lengths = draw.below(3, n) + t - 2, draw.below(2, n) + 1
    return draw.real(t, n, c).log_softmax(-1), draw.below(c - 1, n, 2) + 1, *lengths


@calls("_ctc_loss.Tensor")
def ctc(draw: Draw) -> Example:
    # what lies beyond a sample's lengths in log_alpha is not defined
    return example("_ctc_loss.Tensor", *ctc_call(draw, equal=True))


@calls("_ctc_loss_backward.Tensor")
def ctc_backward(draw: Draw) -> Example:
    call = ctc_call(draw, equal=False)
    value, alpha = torch.ops.aten._ctc_loss.Tensor(*call)
    # torch leaves memory as it was where no path of a sample gets to
    alpha = torch.where(reached(alpha, *call[2:]), alpha, -math.inf)
    return example("_ctc_loss_backward.Tensor", draw.real(*value.shape), *call, value, alpha, 0)


@calls("fxpar::ctc_loss", "fxpar::ctc_loss_backward")
def padded_ctc(draw: Draw, op: str) -> Example:
    call = (*ctc_call(draw, equal=False), 0, draw.chance())
    if op == "fxpar::ctc_loss":
        return example(op, *call)
    loss, alpha = torch.ops.fxpar.ctc_loss(*call)
    return example(op, draw.real(*loss.shape), *call[:4], loss, alpha, *call[4:])


# linear algebra, transforms, experts


@calls(
    "linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "linalg_cholesky_ex", "linalg_qr", "_linalg_eigh", "_linalg_svd"
)
def matrices(draw: Draw, op: str) -> Example:
    a = draw.real(draw.size(1, 5), 3, 3)
    return example(op, a @ a.mT + torch.eye(3, dtype=a.dtype))


@calls("trace")
def trace(draw: Draw) -> Example:
    return example("trace", draw.real(4, 3))


@calls("_fft_r2c")
def fft_real(draw: Draw) -> Example:
    return example("_fft_r2c", draw.real(4, 3, 6), draw.pick([2], [1, 2], [0]), 0, draw.chance())


@calls("_fft_c2c")
def fft_complex(draw: Draw) -> Example:
    return example(
        "_fft_c2c", torch.complex(draw.real(4, 3, 6), draw.real(4, 3, 6)), draw.pick([2], [1]), 0, draw.chance()
    )


@calls("_fft_c2r")
def fft_back(draw: Draw) -> Example:
    return example("_fft_c2r", torch.fft.rfft(draw.real(4, 3, 6)), [2], 2, 6)


@calls("linalg_cross")
def cross(draw: Draw) -> Example:
    return example(
        "linalg_cross", draw.real(4, 3, 3), draw.real(*draw.pick((4, 3, 3), (1, 3, 3))), dim=draw.pick(1, -1)
    )


@calls("_cdist_forward")
def distances(draw: Draw) -> Example:
    return example("_cdist_forward", draw.real(2, 4, 3), draw.real(2, 5, 3), draw.pick(2.0, 1.0), None)


@calls("histc")
def histogram(draw: Draw) -> Example:
    return example("histc", draw.real(*draw.shape()), 4, *draw.pick((-2, 2), (0, 0)))


@calls("_grouped_mm")
def grouped_product(draw: Draw) -> Example:
    def narrow(*shape: int) -> torch.Tensor:
        return draw.below(5, *shape).to(torch.bfloat16) - 2

    offsets = torch.tensor([8, 16], dtype=torch.int32)
    kind = draw.pick("rows", "batch", "contracted")
    if kind == "rows":
        return example("_grouped_mm", narrow(16, 16), narrow(2, 16, 16), offsets)
    if kind == "batch":
        return example("_grouped_mm", narrow(2, 8, 16), narrow(2, 16, 16))
    return example("_grouped_mm", narrow(16, 16), narrow(16, 16), offsets)


def experts(draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import transformers.integrations.moe  # noqa: F401  registers the ops

    k, n = draw.size(), draw.size()
    return draw.real(7, k), draw.real(3, k, n), torch.tensor([2, 2, 7], dtype=torch.int32)


@calls("transformers::grouped_mm_fallback")
def expert_product(draw: Draw) -> Example:
    return example("transformers::grouped_mm_fallback", *experts(draw))


@calls("transformers::grouped_mm_fallback_backward")
def expert_product_backward(draw: Draw) -> Example:
    x, w, offsets = experts(draw)
    return example("transformers::grouped_mm_fallback_backward", x, w, offsets, draw.real(7, w.shape[-1]))
