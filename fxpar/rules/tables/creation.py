"""Ops that make tensors: what they fill is a loop of the output, shape arguments are local."""

from __future__ import annotations

from fxpar.plans.program import Arg
from fxpar.rules.factor_rule import Block, Call, Factors, Group, Linear
from fxpar.rules.groups import loop
from fxpar.rules.registry import rule


def filled(call: Call) -> Factors:
    """Every dim of the output is a loop. The tensor of ``new_*`` and ``*_like`` lends only its dtype: any layout of it
    serves, and when the shapes agree it follows the output."""
    groups: tuple[Group, ...] = ()
    same = bool(call.inputs) and call.shape(0) == call.out_shape()
    for d, size in enumerate(call.out_shape()):
        groups += loop(call, size, {0: d} if same else {}, {0: d})
    if call.inputs and not same:
        for d, size in enumerate(call.shape(0)):
            groups += loop(call, size, {0: d}, {})
    return Factors(groups, (Linear((0,), ()),) if call.inputs else ())


def local_size(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    return call.op, call.with_args(size=block.output_shape())


rule(
    ["full", "zeros", "ones", "empty.memory_format", "new_zeros", "new_ones", "new_full", "new_empty"],
    filled,
    localise=local_size,
)
rule(["zeros_like", "ones_like", "full_like", "empty_like"], filled)


def local_empty_permuted(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    return "aten.empty.memory_format", (block.output_shape(), *call.args[2:6], None)


rule("empty_permuted", filled, localise=local_empty_permuted)


def local_strided(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    """The strides describe the global tensor; the local one is contiguous."""
    shape = block.output_shape()
    if call.op == "aten.empty_strided.default":
        return "aten.empty.memory_format", (shape, *call.args[2:6], None)
    return "aten.new_empty.default", (call.args[0], shape, *call.args[3:7])


rule(["empty_strided", "new_empty_strided"], filled, localise=local_strided)


def whole(call: Call) -> Factors:
    """Values depend on positions: every rank makes all of them."""
    return Factors()


rule(["arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "scalar_tensor"], whole)
rule(["tril_indices", "triu_indices"], whole)
