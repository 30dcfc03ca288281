"""``fxpar::attention`` and ``fxpar::attention_backward``: scaled dot product attention as two whole ops.

    q [b, h, q, e]    k [b, g, k, e]    v [b, g, k, f]    (h a multiple of g; group-wise shared keys when h > g)
    mask [b|1, h|1, q|1, k|1], bool (True: attend) or added to the scores
    out [b, h, q, f]    lse [b, h, q] = log sum exp of the masked, scaled scores (-inf where every key is masked)

``rows`` says which rows of a causal mask ``q`` holds when the sequence is split: (size, start, length) triples as in
``geometry``; empty: all of them, from the first. Rows whose keys are all masked give 0, with gradient 0, as torch's own
kernels do. Dropout is stateless over the global (b, h, q, k) index. Formulas: the backward of Dao et al.,
FlashAttention (2022), section B.4.

``attention_block`` and its backward are the same ops over part of the keys, ``columns`` saying which. ``key_share`` and
``joined_share`` make parts one: with L = log sum exp lse_i, out = sum exp(lse_i - L) * out_i. Backward takes the joined
out and lse and needs no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.rules.ops.random import LIBRARY
from fxpar.rules.ops.stateless import keep_mask, linear_index

LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, float dropout_p, bool is_causal, "
    "float? scale, bool enable_gqa, int op_id, int[] geometry, int[] rows) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "attention_block(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, float dropout_p, bool is_causal, "
    "float? scale, bool enable_gqa, int op_id, int[] geometry, int[] rows, int[] columns) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "attention_block_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, "
    "Tensor? seed, float dropout_p, bool is_causal, float? scale, bool enable_gqa, int op_id, int[] geometry, "
    "int[] rows, bool mask_needs_grad, int[] columns) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define("key_share(Tensor lse, Tensor top) -> Tensor")
LIBRARY.define("joined_share(Tensor out, Tensor lse, Tensor top, Tensor total) -> (Tensor, Tensor)")
LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, Tensor? seed, "
    "float dropout_p, bool is_causal, float? scale, bool enable_gqa, int op_id, int[] geometry, int[] rows, "
    "bool mask_needs_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype that sums are kept in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def scale_of(q: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def grouped(q: Tensor, k: Tensor) -> Tensor:
    """``[b, h, ...] -> [b, g, h/g, ...]`` for the g heads of ``k``."""
    return q.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))


def masked_scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Scaled scores ``[b, h, q, k]`` in the wide dtype, -inf where masked."""
    dtype = wide(q.dtype)
    query = grouped(q, k).to(dtype) * scale
    scores = (query @ k.to(dtype).unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores


def placed_mask(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, rows: Sequence[int], columns: Sequence[int]
) -> tuple[Tensor | None, bool]:
    """(mask, is_causal) with a causal mask over part of the rows or columns written out."""
    if not (is_causal and (rows or columns)):
        return mask, is_causal
    row = linear_index(rows, q.device) if rows else torch.arange(q.shape[2], device=q.device)
    column = linear_index(columns, q.device) if columns else torch.arange(k.shape[2], device=q.device)
    allowed = column <= row[:, None]
    if mask is None:
        return allowed[None, None], False
    return (mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -math.inf)), False


def rows_without_keys(mask: Tensor) -> Tensor:
    """Rows all of whose keys are masked, in the shape of ``mask`` without its last dim."""
    return ~mask.any(-1) if mask.dtype == torch.bool else (mask == -math.inf).all(-1)


def kept(scores: Tensor, seed: Tensor | None, dropout_p: float, op_id: int, geometry: Sequence[int]) -> Tensor | None:
    """Dropout mask already divided by 1 - p, or None without dropout."""
    if dropout_p == 0.0:
        return None
    if seed is None:
        raise ValueError("attention with dropout needs a seed")
    mask = keep_mask(seed, op_id, dropout_p, geometry, scores.shape, scores.device)
    return mask.to(scores.dtype) * (0.0 if dropout_p >= 1.0 else 1.0 / (1.0 - dropout_p))


def fused_applies(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> bool:
    """True when torch's flash kernel for CPUs computes exactly this."""
    return (
        q.device.type == "cpu"
        and dropout_p == 0.0
        and q.shape[-1] == v.shape[-1]
        and min(q.numel(), k.numel(), v.numel()) > 0
    )


def fused_operands(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Operands as the flash kernel wants them: keys and values per query head, an additive mask."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
        mask = mask.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return q, k, v, mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    op_id: int,
    geometry: Sequence[int],
    rows: Sequence[int],
    columns: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """(out, lse); see the module's docstring."""
    factor = scale_of(q, scale)
    mask, is_causal = placed_mask(q, k, mask, is_causal, rows, columns)
    if fused_applies(q, k, v, dropout_p):
        fq, fk, fv, fmask = fused_operands(q, k, v, mask)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            fq, fk, fv, 0.0, is_causal, attn_mask=fmask, scale=factor
        )
        if mask is not None:  # the kernel says 0 of a row whose keys are all masked
            lse = lse.masked_fill(rows_without_keys(mask), -math.inf)
        return out.contiguous(), lse.contiguous()
    scores = masked_scores(q, k, mask, is_causal, factor)
    if scores.shape[-1] == 0:
        lse = scores.new_full(scores.shape[:-1], -math.inf)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), lse
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    keep = kept(scores, seed, dropout_p, op_id, geometry)
    if keep is not None:
        weights = weights * keep
    out = (grouped(weights, k) @ v.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
    return out.to(q.dtype), lse


def sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """``x`` summed over the dims that ``shape`` broadcasts."""
    return x.sum_to_size(shape)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    op_id: int,
    geometry: Sequence[int],
    rows: Sequence[int],
    mask_needs_grad: bool,
    columns: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (q, k, v, mask) from that of ``out``; the last is empty unless ``mask_needs_grad``."""
    factor = scale_of(q, scale)
    given = mask
    mask, is_causal = placed_mask(q, k, mask, is_causal, rows, columns)
    if fused_applies(q, k, v, dropout_p) and not mask_needs_grad:
        fq, fk, fv, fmask = fused_operands(q, k, v, mask)
        # a row whose keys are all masked has lse = -inf; the kernel would form -inf - -inf there
        finite = lse.masked_fill(lse == -math.inf, 0.0)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, fq, fk, fv, out, finite, 0.0, is_causal, attn_mask=fmask, scale=factor
        )
        if k.shape[1] != q.shape[1]:
            dk, dv = grouped(dk, k).sum(2), grouped(dv, k).sum(2)
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), q.new_empty(0)
    dtype = wide(q.dtype)
    scores = masked_scores(q, k, mask, is_causal, factor)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    keep = kept(scores, seed, dropout_p, op_id, geometry)
    grad_wide = grad.to(dtype)
    used = weights if keep is None else weights * keep
    dv = (grouped(used, k).transpose(-1, -2) @ grouped(grad_wide, k)).sum(2)
    dweights = (grouped(grad_wide, k) @ v.to(dtype).unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    if keep is not None:
        dweights = dweights * keep
    dscores = weights * (dweights - (grad_wide * out.to(dtype)).sum(-1, keepdim=True))
    groups = grouped(dscores, k)
    dq = (groups @ k.to(dtype).unsqueeze(2)).flatten(1, 2) * factor
    dk = (groups.transpose(-1, -2) @ grouped(q, k).to(dtype)).sum(2) * factor
    dmask = sum_to(dscores, given.shape).to(given.dtype) if mask_needs_grad and given is not None else q.new_empty(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask


def key_share(lse: Tensor, top: Tensor) -> Tensor:
    """``exp(lse - top)``, 0 where no key of this part counts; ``top`` is the largest of all parts."""
    return torch.exp(lse - top.masked_fill(top == -math.inf, 0.0))


def joined_share(out: Tensor, lse: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """(this part's summand of the whole ``out``, lse of the whole); ``total``: the sum of all parts' ``key_share``."""
    whole = top + total.log()
    share = torch.exp(lse - whole.masked_fill(whole == -math.inf, 0.0))
    return (out.to(share.dtype) * share.unsqueeze(-1)).to(out.dtype), whole


def _attention_shape(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


def _attention_backward_shape(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs = rest[10]  # mask_needs_grad
    dmask = mask.new_empty(mask.shape) if needs and mask is not None else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dmask


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, seed, *options = inputs
    ctx.save_for_backward(q, k, v, mask, seed, *output)
    ctx.options = options


def _gradient(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple:
    q, k, v, mask, seed, out, lse = ctx.saved_tensors
    wants_mask = bool(ctx.needs_input_grad[3])
    dq, dk, dv, dmask = torch.ops.fxpar.attention_backward(
        grad, q, k, v, mask, out, lse, seed, *ctx.options, wants_mask
    )
    return dq, dk, dv, dmask if wants_mask else None, *(None,) * 8


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("attention", attention, _key)
    LIBRARY.impl("attention_backward", attention_backward, _key)
    LIBRARY.impl("attention_block", attention, _key)
    LIBRARY.impl("attention_block_backward", attention_backward, _key)
torch.library.register_fake("fxpar::attention", _attention_shape, lib=LIBRARY)
torch.library.register_fake("fxpar::attention_backward", _attention_backward_shape, lib=LIBRARY)
torch.library.register_fake("fxpar::attention_block", _attention_shape, lib=LIBRARY)
torch.library.register_fake("fxpar::attention_block_backward", _attention_backward_shape, lib=LIBRARY)
LIBRARY.impl("key_share", key_share, "CompositeExplicitAutograd")
LIBRARY.impl("joined_share", joined_share, "CompositeExplicitAutograd")
torch.library.register_autograd("fxpar::attention", _gradient, setup_context=_save, lib=LIBRARY)
