"""Random ops. They are stateless: an element's draw depends on the seed and its place in the GLOBAL tensor."""

from __future__ import annotations

from fxpar.plans.layout import Digit
from fxpar.plans.program import Arg
from fxpar.rules.factor_rule import Block, Call, Factors, Linear
from fxpar.rules.groups import loop, passes
from fxpar.rules.ops import random as random_ops  # noqa: F401  registers the ops
from fxpar.rules.registry import rule


def geometry(rows: tuple[tuple[Digit, ...], ...]) -> tuple[int, ...]:
    """Digits of all dims in order as flat (size, start, length) triples; a dim of size 1 has none."""
    return tuple(n for row in rows for d in row for n in (d.size, d.start, d.length))


def dropout(call: Call) -> Factors:
    """All dims of ``x`` are loops of every output; the seed is a scalar that every rank holds."""
    outputs = [o for o, out in enumerate(call.outputs) if out is not None]
    groups = tuple(
        g for d, size in enumerate(call.shape(0)) for g in loop(call, size, {0: d}, dict.fromkeys(outputs, d))
    )
    return Factors(groups, passes(call, "0>0"))


def local_dropout(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    return call.op, call.with_args(geometry=geometry(block.inputs[0]))


rule("fxpar::dropout", dropout, localise=local_dropout, random=True)


def drawn(call: Call) -> Factors:
    """Draws in the shape of ``x``, whose values nobody reads."""
    return Factors(dropout(call).groups, (Linear((0,), ()),))


rule(["fxpar::uniform", "fxpar::normal"], drawn, localise=local_dropout, random=True)
