"""``fxpar::experts`` and ``fxpar::experts_backward``: a mixture of experts' routed MLPs as two whole ops.

    x [t, d]    index [t, k] expert of each slot    weight [t, k]    up [e, g f, d]    down [e, d, f]    (gated: g = 2)
    out [t, d] = sum over k of weight[t, k] * down[i] @ h(up[i] @ x[t]),  i = index[t, k]
    h(a) = act(first half of a) * second half of a when gated, else act(a)

``rows`` says which experts ``up`` and ``down`` hold when the experts are split, as (size, start, length) triples (see
``fxpar::embedding_block``); empty: all of them. Slots of other experts add nothing and cost nothing: rows are picked
and sorted by expert on each rank for itself, so no order of all tokens is ever made. ``experts`` is the global number.
Backward computes the hidden values again (two thirds of forward's products) rather than keep ``[t, k, g*f]``.
The sum over k is kept in float32 for narrower dtypes and has one order, so replicas stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpar.rules.ops.attention import wide
from fxpar.rules.ops.embedding_block import local_rows
from fxpar.rules.ops.random import LIBRARY

LIBRARY.define(
    "experts(Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, str act, bool gated, int experts, "
    "int[] rows) -> Tensor"
)
LIBRARY.define(
    "experts_backward(Tensor grad, Tensor x, Tensor index, Tensor weight, Tensor up, Tensor down, str act, "
    "bool gated, int experts, int[] rows) -> (Tensor, Tensor, Tensor, Tensor)"
)

_aten = torch.ops.aten

Gradient = Callable[[Tensor, Tensor], Tensor]
"""(gradient of the activation's result, its argument) -> gradient of the argument."""

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Gradient]] = {
    "silu": (F.silu, lambda grad, a: _aten.silu_backward(grad, a)),
    "gelu": (F.gelu, lambda grad, a: _aten.gelu_backward(grad, a)),
    "gelu_tanh": (
        lambda a: F.gelu(a, approximate="tanh"),
        lambda grad, a: _aten.gelu_backward(grad, a, approximate="tanh"),
    ),
    "relu": (F.relu, lambda grad, a: _aten.threshold_backward(grad, a, 0)),
    "relu2": (lambda a: F.relu(a).square(), lambda grad, a: grad * 2 * F.relu(a)),
}
"""Activations an expert may have, by the name that a program gives them."""


@dataclass(frozen=True)
class Routed:
    """The slots that go to experts held here, sorted by expert.

    ``slots`` [r]: numbers t * k + j in that order; ``tokens`` [r]: their t; ``counts``: rows per held expert, adding up
    to r; ``place`` [t, k]: where each slot is in that order, r for those of other experts.
    """

    slots: Tensor
    tokens: Tensor
    counts: tuple[int, ...]
    place: Tensor


def routed(index: Tensor, held: int, rows: Sequence[int]) -> Routed:
    """Which slots of ``index`` [t, k] go to the ``held`` experts of this rank."""
    flat = index.reshape(-1)
    local, here = local_rows(flat, list(rows)) if rows else (flat, flat >= 0)
    # numbers past the last expert are of none
    here = here & (flat < (math.prod(rows[::3]) if rows else held))
    key = torch.where(here, local, held)
    order = torch.argsort(key, stable=True)
    counts = torch.bincount(key, minlength=held + 1)[:held].tolist()
    total = sum(counts)
    slots = order[:total]
    place = torch.full_like(flat, total)
    place[slots] = torch.arange(total, device=flat.device)
    return Routed(slots, slots // max(index.shape[1], 1), tuple(counts), place.view(index.shape))


def _fused(x: Tensor, *others: Tensor) -> bool:
    """True when torch's grouped kernel for GPUs takes these (bfloat16, rows of whole 16 bytes)."""
    return (
        x.is_cuda
        and hasattr(F, "grouped_mm")
        and all(t.dtype == torch.bfloat16 and t.numel() > 0 and t.shape[-1] % 8 == 0 for t in (x, *others))
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


def product(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """``[r, i]`` through each row's own ``weight`` ([e, o, i]): ``[r, o]``."""
    if _fused(x, weight) and weight.shape[1] % 8 == 0:
        return F.grouped_mm(x, weight.contiguous().transpose(-2, -1), offs=_ends(counts, x.device))
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, (some, result) in enumerate(zip(x.split(list(counts)), out.split(list(counts)), strict=True)):
        torch.mm(some, weight[expert].t(), out=result)
    return out


def product_backward(grad: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Gradient of :func:`product`'s ``x``."""
    if _fused(grad, weight):
        return F.grouped_mm(grad, weight.contiguous(), offs=_ends(counts, grad.device))
    out = grad.new_empty(grad.shape[0], weight.shape[2])
    for expert, (some, result) in enumerate(zip(grad.split(list(counts)), out.split(list(counts)), strict=True)):
        torch.mm(some, weight[expert], out=result)
    return out


def weight_gradient(grad: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Gradient ``[e, o, i]`` of :func:`product`'s weight, zero for experts without rows."""
    if _fused(x, grad):
        return F.grouped_mm(grad.t(), x, offs=_ends(counts, x.device))
    out = x.new_zeros(len(counts), grad.shape[1], x.shape[1])
    for expert, (some, rows) in enumerate(zip(grad.split(list(counts)), x.split(list(counts)), strict=True)):
        if rows.shape[0]:
            torch.mm(some.t(), rows, out=out[expert])
    return out


def hidden(pre: Tensor, act: str, gated: bool) -> Tensor:
    """``h`` of the module's docstring for rows ``[r, g*f]``."""
    function = ACTIVATIONS[act][0]
    if not gated:
        return function(pre)
    gate, up = pre.chunk(2, dim=-1)
    return function(gate) * up


def hidden_backward(grad: Tensor, pre: Tensor, act: str, gated: bool) -> Tensor:
    """Gradient of ``pre`` from that of ``h``."""
    function, gradient = ACTIVATIONS[act]
    if not gated:
        return gradient(grad, pre)
    gate, up = pre.chunk(2, dim=-1)
    return torch.cat([gradient(grad * up, gate), grad * function(gate)], dim=-1)


def summed(rows: Tensor, place: Tensor, like: Tensor) -> Tensor:
    """``out[t] = sum over j of rows[place[t, j]]``, rows past the last being zero; in the dtype of ``like``."""
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    out = rows.new_zeros(place.shape[0], rows.shape[1], dtype=wide(rows.dtype))
    for slot in place.unbind(1):
        out += padded[slot]
    return out.to(like.dtype)


def experts(
    x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor, act: str, gated: bool, experts: int,
    rows: Sequence[int],
) -> Tensor:
    """``[t, d]``; see the module's docstring."""
    mine = routed(index, up.shape[0], rows)
    pre = product(x[mine.tokens], up, mine.counts)
    out = product(hidden(pre, act, gated), down, mine.counts)
    return summed(out * weight.reshape(-1)[mine.slots, None], mine.place, x)


def experts_backward(
    grad: Tensor, x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor, act: str, gated: bool,
    experts: int, rows: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, up, down) from that of ``out``.

    The gradient of ``weight[t, k]`` is the product of ``h`` with ``down[i].T @ grad[t]``, which the gradient of ``h``
    needs anyway: the rows of ``out`` are not computed again.
    """
    mine = routed(index, up.shape[0], rows)
    taken, sent = x[mine.tokens], grad[mine.tokens]
    pre = product(taken, up, mine.counts)
    h = hidden(pre, act, gated)
    share = weight.reshape(-1)[mine.slots, None]
    through = product_backward(sent, down, mine.counts)
    # expert by expert: the products in the wide dtype need not all be there at once
    pairs = zip(through.split(list(mine.counts)), h.split(list(mine.counts)), strict=True)
    dots = [(a.to(wide(a.dtype)) * b).sum(-1).to(weight.dtype) for a, b in pairs]
    dweight = torch.cat([*dots, weight.new_zeros(1)])[mine.place]
    ddown = weight_gradient((sent * share).to(h.dtype), h, mine.counts)
    del h, sent
    dpre = hidden_backward((through * share).to(pre.dtype), pre, act, gated)
    del pre, through
    dup = weight_gradient(dpre, taken, mine.counts)
    dx = summed(product_backward(dpre, up, mine.counts), mine.place, x)
    return dx, dweight, dup, ddown


def _shape(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _backward_shape(
    grad: Tensor, x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), up.new_empty(up.shape), down.new_empty(down.shape)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, index, weight, up, down, *options = inputs
    ctx.save_for_backward(x, index, weight, up, down)
    ctx.options = options


def _gradient(ctx: Any, grad: Tensor) -> tuple:
    dx, dweight, dup, ddown = torch.ops.fxpar.experts_backward(grad, *ctx.saved_tensors, *ctx.options)
    return dx, None, dweight, dup, ddown, *(None,) * 4


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("experts", experts, _key)
    LIBRARY.impl("experts_backward", experts_backward, _key)
torch.library.register_fake("fxpar::experts", _shape, lib=LIBRARY)
torch.library.register_fake("fxpar::experts_backward", _backward_shape, lib=LIBRARY)
torch.library.register_autograd("fxpar::experts", _gradient, setup_context=_save, lib=LIBRARY)
