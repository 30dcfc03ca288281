"""Linear algebra, transforms and distances on the last dims; leading dims are loops. Experts' grouped products."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxpar.rules.factor_rule import Call, Factors, Group, Slot
from fxpar.rules.groups import dims_of, loop, passes
from fxpar.rules.registry import rule


def batched(last: int, linear: tuple[str, ...] = ()) -> Callable[[Call], Factors]:
    """The last ``last`` dims of every operand stay whole; leading dims, aligned from the left, are loops of all."""

    def factors(call: Call) -> Factors:
        lead = len(call.shape(0)) - last
        groups: tuple[Group, ...] = ()
        for d, size in enumerate(call.shape(0)[: max(lead, 0)]):
            if all(len(t.shape) > d and t.shape[d] == size for t in call.inputs):
                outputs = [o for o, out in enumerate(call.outputs) if out is not None]
                groups += loop(
                    call, size, dict.fromkeys(range(len(call.inputs)), d), dict.fromkeys(outputs, d), nonempty=True
                )
        return Factors(groups, passes(call, *linear))

    factors.__name__ = "batched"
    return factors


rule(
    ["linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "linalg_cholesky_ex", "linalg_qr", "_linalg_eigh",
     "_linalg_svd"],
    batched(2),
)  # fmt: skip
rule("trace", batched(2, ("0",)))


def transform(call: Call) -> Factors:
    """A Fourier transform: linear, the transformed dims stay whole."""
    rank = len(call.shape(0))
    kept = dims_of(call.arg("dim"), rank)
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)):
        if d not in kept:
            groups += loop(call, size, {0: d}, {0: d}, nonempty=True)
    return Factors(groups, passes(call, "0"))


rule(["_fft_r2c", "_fft_c2c", "_fft_c2r"], transform)


def cross(call: Call) -> Factors:
    """Vector product along ``dim``, bilinear."""
    rank = len(call.out_shape())
    dim = call.arg("dim") % rank
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.out_shape()):
        if d != dim:
            inputs = {i: d for i in (0, 1) if len(call.shape(i)) == rank and call.shape(i)[d] == size}
            groups += loop(call, size, inputs, {0: d})
    return Factors(groups, passes(call, "0", "1"))


rule("linalg_cross", cross)


def distances(call: Call) -> Factors:
    """``[..., p, m!], [..., r, m!] -> [..., p, r]``."""
    rank = len(call.out_shape())
    if len(call.shape(0)) != rank or len(call.shape(1)) != rank:
        return Factors()
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.out_shape()[:-2]):
        inputs = {i: d for i in (0, 1) if call.shape(i)[d] == size}
        groups += loop(call, size, inputs, {0: d})
    groups += loop(call, call.shape(0)[-2], {0: rank - 2}, {0: rank - 2})
    groups += loop(call, call.shape(1)[-2], {1: rank - 2}, {0: rank - 1})
    return Factors(groups)


rule("_cdist_forward", distances)


def histogram(call: Call) -> Factors:
    """Counts over all elements; without a range the bounds are those of all elements."""
    if call.arg("min") == call.arg("max"):
        return Factors()
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)):
        groups += loop(call, size, {0: d}, {}, contract={0: "sum"})
    return Factors(groups)


rule("histc", histogram)


def grouped_product(call: Call) -> Factors:
    """Rows in consecutive groups, one matrix a group: ``s! k, g! k n, g! -> s! n``.

    The rows of a group are contiguous in the global tensor, so rows stay whole; without offsets: a batched product.
    torch's kernel wants rows of a multiple of 16 bytes, so k and n are cut in such pieces.
    """
    a, b, out = call.shape(0), call.shape(1), call.out_shape()
    grain = 16 // getattr(torch, call.inputs[0].dtype).itemsize
    groups: tuple[Group, ...] = ()
    if len(a) == len(b) == 3:
        groups += loop(call, a[0], {0: 0, 1: 0}, {0: 0}, nonempty=True)
    if call.has("bias") and call.operand("bias") is not None:
        return Factors(groups)
    if b[-1] % grain == 0:
        columns = {1: Slot((len(b) - 1,), 1, grain)}
        groups += loop(call, b[-1] // grain, columns, {0: Slot((len(out) - 1,), 1, grain)}, nonempty=True)
    if len(b) == 3 and b[1] % grain == 0:
        terms = {0: Slot((len(a) - 1,), 1, grain), 1: Slot((1,), 1, grain)}
        groups += loop(call, b[1] // grain, terms, {}, contract={0: "sum"}, nonempty=True)
    return Factors(groups, passes(call, "0", "1"))


rule("_grouped_mm", grouped_product)
rule("transformers::grouped_mm_fallback", "s! k, g! k n, g! -> s! n", linear=("0", "1"))
rule(
    "transformers::grouped_mm_fallback_backward",
    "s! k, g! k n, g!, s! n -> s! k, g! k n",
    reads=("13", "03"),
    linear=("3", "0>1", "1>0"),
)
