"""Normalisations: a normalised dim is split in steps (layer norm, RMS norm) or stays whole; gradients of scale and
shift are contracted over the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpar.plans.program import Arg
from fxpar.rules.expansions.rows import ROW, split_norm, split_norm_backward
from fxpar.rules.factor_rule import Block, Call, Factors, Group, Linear, Slot
from fxpar.rules.groups import Region, loop, passes
from fxpar.rules.registry import rule


def affine_sums(call: Call) -> tuple[Linear, ...]:
    """The result is jointly linear in scale and shift; the statistics do not read them."""
    affine = [o for name in ("weight", "bias") if call.has(name) and (o := call.operand(name)) is not None]
    return (Linear(tuple(affine), (0,)),) if affine else ()


def row_norm(rows_in: Sequence[str], rows_out: Sequence[int]) -> Callable[[Call], Factors]:
    """Rows are loops of the operands ``rows_in`` and the outputs ``rows_out``; other outputs are sums over the rows.
    The normalised dims are loops that expand, of the gradients too, of weight and bias and of what is not a statistic.
    """

    def factors(call: Call) -> Factors:
        operands = [o for name in rows_in if (o := call.operand(name)) is not None]
        shape = call.shape(operands[0])
        rows = len(shape) - len(call.arg("normalized_shape"))
        outputs = [o for o, out in enumerate(call.outputs) if out is not None]
        carried = [o for o in outputs if o in rows_out]
        summed = {o: "sum" for o in outputs if o not in rows_out}
        groups: tuple[Group, ...] = ()
        for d, size in enumerate(shape[:rows]):
            groups += loop(call, size, dict.fromkeys(operands, d), dict.fromkeys(carried, d), contract=summed)
        affine = [o for name in ("weight", "bias") if call.has(name) and (o := call.operand(name)) is not None]
        for d, size in enumerate(shape[rows:]):
            inputs = {o: rows + d for o in operands if call.shape(o) == shape} | dict.fromkeys(affine, d)
            results = {o: rows + d for o in carried if call.out_shape(o) == shape} | dict.fromkeys(summed, d)
            groups += loop(call, size, inputs, results, expands=ROW)
        return Factors(groups, passes(call, "0") if rows_in[0] == "grad_out" else affine_sums(call))

    factors.__name__ = "row_norm"
    return factors


rule("native_layer_norm", row_norm(("input",), (0, 1, 2)), expand=split_norm)
rule(
    "native_layer_norm_backward", row_norm(("grad_out", "input", "mean", "rstd"), (0,)), expand=split_norm_backward
)
rule("_fused_rms_norm", row_norm(("input",), (0, 1)), expand=split_norm)


def group_norm(call: Call) -> Factors:
    """Samples and groups are loops; weight and bias carry the groups."""
    channels, count = call.arg("C"), call.arg("group")
    per = channels // count
    samples = call.shape(0)[0]
    affine = {o: Slot((0,), 1, per) for name in ("weight", "bias") if (o := call.operand(name)) is not None}
    outputs: dict[int, Region] = {0: Slot((1,), 1, per), 1: 1, 2: 1}
    groups = loop(call, samples, {0: 0}, {0: 0, 1: 0, 2: 0}, nonempty=True)
    groups += loop(call, count, {0: Slot((1,), 1, per), **affine}, outputs, nonempty=True)
    return Factors(groups, affine_sums(call))


def group_norm_backward(call: Call) -> Factors:
    channels, count = call.arg("C"), call.arg("group")
    per = channels // count
    samples = call.shape(0)[0]
    weight = call.operand("weight")
    present = {o for o, out in enumerate(call.outputs) if out is not None}
    summed = dict.fromkeys(sorted(present - {0}), "sum")
    part = Slot((1,), 1, per)
    inputs: dict[int, Region] = {0: part, 1: part, 2: 1, 3: 1}
    if weight is not None:
        inputs[weight] = Slot((0,), 1, per)
    outputs: dict[int, Region] = {o: part if o == 0 else Slot((0,), 1, per) for o in present}
    groups = loop(
        call, samples, dict.fromkeys(range(4), 0), {0: 0} if 0 in present else {}, contract=summed, nonempty=True
    )
    groups += loop(call, count, inputs, outputs, nonempty=True)
    return Factors(groups, passes(call, "0"))


def local_group_norm(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    """Samples, channels and groups of the local block."""
    first = 0 if call.op == "aten.native_group_norm.default" else 1
    samples, channels = block.input_shape(first)[:2]
    count = channels * call.arg("group") // call.arg("C")
    return call.op, call.with_args(N=samples, C=channels, group=count)


rule("native_group_norm", group_norm, localise=local_group_norm)
rule("native_group_norm_backward", group_norm_backward, localise=local_group_norm)


def weight_norm(call: Call) -> Factors:
    """``v * (g / |v|)`` with norms over all dims but ``dim``: ``dim`` is a loop, the others stay whole."""
    dim = call.arg("dim") % len(call.out_shape())
    size = call.out_shape()[dim]
    inputs = {i: dim for i, t in enumerate(call.inputs) if len(t.shape) > dim and t.shape[dim] == size}
    return Factors(loop(call, size, inputs, {0: dim, 1: dim}, nonempty=True), ())


rule("_weight_norm_interface", weight_norm)


def weight_norm_backward(call: Call) -> Factors:
    return Factors(weight_norm(call).groups, passes(call, "0"))


rule("_weight_norm_interface_backward", weight_norm_backward)
