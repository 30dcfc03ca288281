"""Linear algebra, transforms and distances on the last dims; leading dims are loops. Experts' grouped products."""

from __future__ import annotations

from collections.abc import Callable

from fxpar.rules.factor_rule import Call, Factors, Group
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
    """Rows in consecutive groups, one matrix a group: ``s! k, g! k n, g! -> s! n`` (also the three other forms).

    The rows of a group are contiguous in the global tensor, so rows and groups stay whole.
    """
    a, b = call.shape(0), call.shape(1)
    bias = call.operand("bias") if call.has("bias") else None
    groups: tuple[Group, ...] = ()
    n_in, n_out = len(b) - 1, len(call.out_shape()) - 1
    offsets = call.operand("offs")
    contracted_rows = len(a) == 2 and len(b) == 2 and offsets is not None
    added = {bias: len(call.shape(bias)) - 1} if bias is not None else {}
    groups += loop(call, b[-1], {1: n_in, **added}, {0: n_out})
    if contracted_rows:
        # [m, s!] x [s!, n] -> [g!, m, n]: the groups cut the contracted dim
        groups += loop(call, a[0], {0: 0}, {0: 1})
    elif len(a) == 2:
        groups += loop(
            call, a[1], {0: 1, 1: len(b) - 2}, {}, contract={0: "sum"}, addends=() if bias is None else (bias,)
        )
    entries = ("0", "1") if bias is None else ()
    return Factors(groups, passes(call, *entries))


rule(["_grouped_mm", "transformers::grouped_mm_fallback"], grouped_product)


def recurrent_cell(call: Call) -> Factors:
    """LSTM and GRU cells: samples are a loop, the gates of a sample stay together."""
    samples = call.shape(0)[0]
    inputs = {i: 0 for i, t in enumerate(call.inputs) if len(t.shape) == 2}
    outputs = {o: 0 for o, out in enumerate(call.outputs) if out is not None}
    return Factors(loop(call, samples, inputs, outputs, nonempty=True))


rule(["_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"], recurrent_cell)
