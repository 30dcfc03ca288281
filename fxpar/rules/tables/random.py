"""Random ops. They are stateless: an element's draw depends on the seed and its place in the GLOBAL tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxpar.plans.layout import Digit
from fxpar.plans.program import Arg
from fxpar.rules.factor_rule import Block, Call, Factors, Linear
from fxpar.rules.groups import loop, passes
from fxpar.rules.ops import random as random_ops  # noqa: F401  registers the ops
from fxpar.rules.registry import rule

Rows = tuple[tuple[Digit, ...], ...]
Triples = list[tuple[int, ...]]


def geometry(rows: Rows, of_microbatch: Sequence[int] = ()) -> tuple[int, ...]:
    """Digits of all dims in order as flat (size, start, length) triples; a dim of size 1 has none.

    ``of_microbatch``: the geometry of the call that ``rows`` are cut from. Where that is one microbatch's (see
    ``stateless``) the digits are placed in it.

    Raises:
        ValueError: a run is cut that holds the batch, but does not begin with it.
    """
    digits: Triples = [(d.size, d.start, d.length) for row in rows for d in row]
    if len(of_microbatch) % 3:
        digits = placed(digits, [(*of_microbatch[i : i + 3],) for i in range(0, len(of_microbatch) - 1, 3)])
        return (*(n for digit in digits for n in digit), of_microbatch[-1])
    return tuple(n for digit in digits for n in digit)


def placed(digits: Sequence[tuple[int, ...]], outer: Triples) -> Triples:
    """``digits`` of a tensor that is itself cut as ``outer`` says, as digits of what that was cut from.

        digits 2/6 of (3 4), outer (B 0 3) (4 0 4)   ->   2/6 of (B 4)
    """
    found: Triples = []
    left = list(outer)
    for size, start, length in digits:
        while left and left[0][2] == 1:  # no logical dim any more
            found.append(left.pop(0))
        covered: Triples = []
        while math.prod(n for *_, n in covered) < size:
            covered.append(left.pop(0))
        if length == size:
            found += covered
        elif all(n == whole for whole, _, n in covered[1:]):
            found.append((math.prod(whole for whole, *_ in covered), start, length))
        else:
            raise ValueError(f"a draw cannot be cut along {covered}")
    return found + left


def dropout(call: Call) -> Factors:
    """All dims of ``x`` are loops of every output; the seed is a scalar that every rank holds."""
    outputs = [o for o, out in enumerate(call.outputs) if out is not None]
    groups = tuple(
        g for d, size in enumerate(call.shape(0)) for g in loop(call, size, {0: d}, dict.fromkeys(outputs, d))
    )
    return Factors(groups, passes(call, "0>0"))


def local_dropout(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    return call.op, call.with_args(geometry=geometry(block.inputs[0], call.arg("geometry")))


rule("fxpar::dropout", dropout, localise=local_dropout, random=True)


def drawn(call: Call) -> Factors:
    """Draws in the shape of ``x``, whose values nobody reads."""
    return Factors(dropout(call).groups, (Linear((0,), ()),))


rule(["fxpar::uniform", "fxpar::normal"], drawn, localise=local_dropout, random=True)
