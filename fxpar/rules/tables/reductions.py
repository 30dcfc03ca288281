"""Reductions along dims, and ops that order or accumulate along one dim."""

from __future__ import annotations

from collections.abc import Callable

from fxpar.rules.expansions.places import PLACED, RUNNING, over_one_axis, split_cumsum, split_extreme
from fxpar.rules.expansions.rows import (
    ROW,
    split_log_softmax,
    split_log_softmax_backward,
    split_logsumexp,
    split_softmax,
    split_softmax_backward,
    split_vector_norm,
)
from fxpar.rules.factor_rule import Call, Factors, Group
from fxpar.rules.groups import dims_of, loop, passes
from fxpar.rules.registry import rule


def reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims that go; an op without a ``dim`` argument reduces all."""
    rank = len(call.shape(0))
    return dims_of(call.arg("dim") if call.has("dim") else None, rank)


def kept_places(call: Call, gone: tuple[int, ...]) -> dict[int, int]:
    """Input dim -> output dim for the dims that stay."""
    rank = len(call.shape(0))
    keepdim = len(next((o.shape for o in call.outputs if o is not None), ())) == rank
    kept = [d for d in range(rank) if d not in gone]
    return {d: d if keepdim else i for i, d in enumerate(kept)}


def runs_in_steps(call: Call, word: str) -> bool:
    """What goes through the all-reduces of a ROW are real numbers: exponentials of integers are of another dtype than
    their maximum, and complex ones have none."""
    return word != ROW or call.inputs[0].dtype.startswith(("float", "bfloat"))


def reduction(
    contract: str | None = None, *, linear: tuple[str, ...] = (), nonempty: bool = False, expands: str = ""
) -> Callable[[Call], Factors]:
    """The reduced dims are contracted with the pending reduction ``contract``, or reduced in steps (``expands``), or
    stay whole when neither is given."""

    def factors(call: Call) -> Factors:
        gone = reduced_dims(call)
        outputs = tuple(o for o, out in enumerate(call.outputs) if out is not None)
        groups: tuple[Group, ...] = ()
        places = kept_places(call, gone)
        for d, size in enumerate(call.shape(0)):
            if d in places:
                groups += loop(call, size, {0: d}, dict.fromkeys(outputs, places[d]))
            elif contract:
                groups += loop(call, size, {0: d}, {}, contract=dict.fromkeys(outputs, contract), nonempty=nonempty)
            elif expands and runs_in_steps(call, expands):
                groups += loop(call, size, {0: d}, {}, expands=expands)
        return Factors(groups, passes(call, *linear))

    factors.__name__ = "reduction"
    return factors


rule(["sum", "sum.dim_IntList"], reduction("sum", linear=("0",)))
rule(["amax", "max"], reduction("max", nonempty=True))
rule(["amin", "min"], reduction("min", nonempty=True))
rule(["mean", "mean.dim"], reduction(linear=("0",)))
rule(["nansum", "count_nonzero.dim_IntList"], reduction("sum"))
rule(
    [
        "prod", "prod.dim_int",
        "var.correction", "std.correction",
        "var_mean.correction", "std_mean.correction", "var.dim", "std.dim",
        "norm.ScalarOpt_dim", "norm.Scalar", "norm.ScalarOpt_dim_dtype",
        "median", "median.dim", "nanmedian.dim", "mode", "kthvalue", "aminmax",
    ],
    reduction(),
)  # fmt: skip

rule(["any", "any.dim", "any.dims"], reduction("max"))
rule(["all", "all.dim", "all.dims"], reduction("min"))
rule("logsumexp", reduction(expands=ROW), expand=split_logsumexp)
rule(["argmax", "argmin", "max.dim", "min.dim"], reduction(expands=PLACED), expand=split_extreme)


def vector_norm(call: Call) -> Factors:
    """Norms of finite, positive order of real values are taken in steps."""
    order = call.arg("ord")
    stepwise = 0 < order < float("inf")
    return reduction(expands=ROW if stepwise else "")(call)


rule("linalg_vector_norm", vector_norm, expand=split_vector_norm)


def along(linear: tuple[str, ...] = (), expands: str = "") -> Callable[[Call], Factors]:
    """``dim`` stays whole in operand and outputs, or runs in steps (``expands``); the other dims are loops of every
    operand."""

    def factors(call: Call) -> Factors:
        rank = len(call.shape(0))
        kept = call.arg("dim") % max(rank, 1)
        outputs = {o: out for o, out in enumerate(call.outputs) if out is not None}
        groups: tuple[Group, ...] = ()
        for d, size in enumerate(call.shape(0)):
            if d != kept:
                groups += loop(call, size, dict.fromkeys(range(len(call.inputs)), d), dict.fromkeys(outputs, d))
        if expands and rank and runs_in_steps(call, expands):
            every = dict.fromkeys(range(len(call.inputs)), kept)
            # running sums want pieces that follow each other
            loose = expands == RUNNING
            groups += loop(
                call, call.shape(0)[kept], every, dict.fromkeys(outputs, kept), expands=expands, loose=loose
            )
        return Factors(groups, passes(call, *linear))

    factors.__name__ = "along"
    return factors


rule("cumsum", along(("0",), RUNNING), expand=split_cumsum, offers=over_one_axis)
rule(
    ["cumprod", "logcumsumexp", "cummax", "cummin", "sort", "sort.stable", "topk", "argsort", "argsort.stable"], along()
)
rule(["_softmax", "_safe_softmax", "softmax.int"], along(expands=ROW), expand=split_softmax)
rule(["_log_softmax", "log_softmax.int"], along(expands=ROW), expand=split_log_softmax)
rule("_softmax_backward_data", along(("0",), ROW), expand=split_softmax_backward)
rule("_log_softmax_backward_data", along(("0",), ROW), expand=split_log_softmax_backward)
rule("glu", along())
rule("glu_backward", along(("0",)))


def renorm(call: Call) -> Factors:
    """Every slice along ``dim`` is scaled by its own norm: ``dim`` is a loop, the others stay whole."""
    d = call.arg("dim") % len(call.shape(0))
    return Factors(loop(call, call.shape(0)[d], {0: d}, {0: d}))


rule("renorm", renorm)


def searched(call: Call) -> Factors:
    """Boundaries stay whole along their last dim; for one shared row of them every dim of the values is a loop."""
    values = call.operand("self") if call.operand("self") is not None else None
    if values is None or not call.outputs or call.outputs[0] is None:
        return Factors()
    bounds = call.operand("sorted_sequence") if call.has("sorted_sequence") else call.operand("boundaries")
    groups: tuple[Group, ...] = ()
    shared = bounds is not None and len(call.shape(bounds)) == 1
    rank = len(call.out_shape())
    for d, size in enumerate(call.out_shape()):
        inputs = {i: d for i in range(len(call.inputs)) if i == values or (not shared and d < rank - 1)}
        groups += loop(call, size, inputs, {0: d})
    return Factors(groups)


rule(["searchsorted.Tensor", "bucketize.Tensor"], searched)
