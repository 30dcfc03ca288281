"""Embeddings: rows of a table picked by ids. Splitting the rows makes each rank look up only the ids it owns."""

from __future__ import annotations

from fxpar.plans.layout import Digit
from fxpar.plans.program import Arg
from fxpar.rules.factor_rule import Block, Call, Factors, Group
from fxpar.rules.groups import loop, passes
from fxpar.rules.ops import embedding_block  # noqa: F401  the ops that a split table becomes
from fxpar.rules.registry import rule


def embedding(call: Call) -> Factors:
    """``v d, ... -> ... d``; rows split: ids of other ranks give zeros, so the output is a pending sum."""
    rows, width = call.shape(0)
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(1)):
        groups += loop(call, size, {1: d}, {0: d})
    groups += loop(call, rows, {0: 0}, {}, contract={0: "sum"})
    groups += loop(call, width, {0: 1}, {0: len(call.shape(1))})
    return Factors(groups, passes(call, "0"))


def is_whole(row: tuple[Digit, ...]) -> bool:
    return all(d.length == d.size for d in row)


def flat_digits(row: tuple[Digit, ...]) -> tuple[int, ...]:
    """Digits as (size, start, length) triples, flattened."""
    return tuple(n for d in row for n in (d.size, d.start, d.length))


def local_embedding(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    row = block.inputs[0][0]
    if is_whole(row):
        return call.op, call.args
    return "fxpar.embedding_block.default", (*call.args[:2], flat_digits(row))


rule("embedding", embedding, localise=local_embedding)


def embedding_backward(call: Call) -> Factors:
    """``... d, ... -> v d``: ids are contracted, rows are a loop of the output alone."""
    rank = len(call.shape(1))
    groups: tuple[Group, ...] = ()
    if not call.arg("scale_grad_by_freq"):  # the counts of ids are over all ids
        for d, size in enumerate(call.shape(1)):
            groups += loop(call, size, {0: d, 1: d}, {}, contract={0: "sum"})
        groups += loop(call, call.arg("num_weights"), {}, {0: 0})
    groups += loop(call, call.shape(0)[-1], {0: rank}, {0: 1})
    return Factors(groups, passes(call, "0"))


def local_embedding_backward(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    rows = block.outputs[0]
    if rows is None or is_whole(rows[0]):
        return call.op, call.args
    # padding_idx names a row of the whole table: the op compares it before ids are shifted
    return "fxpar.embedding_block_backward.default", (
        *call.args[:2],
        flat_digits(rows[0]),
        call.arg("padding_idx"),
    )


rule("embedding_dense_backward", embedding_backward, localise=local_embedding_backward)


def bag(call: Call) -> Factors:
    """Bags stay whole; only the width of the rows is a loop (of the first output)."""
    # the largest indices are of every column when the mode is a maximum
    outputs = {o: 1 for o in (0, 3) if len(call.outputs) > o and len(call.out_shape(o)) == 2}
    return Factors(loop(call, call.shape(0)[1], {0: 1}, outputs), passes(call, "0>0") if call.arg("mode") != 2 else ())


rule(["_embedding_bag", "_embedding_bag_forward_only"], bag)


def bag_backward(call: Call) -> Factors:
    return Factors(loop(call, call.shape(0)[1], {0: 1}, {0: 1}), passes(call, "0") if call.arg("mode") != 2 else ())


rule(["_embedding_bag_dense_backward", "_embedding_bag_backward"], bag_backward)
