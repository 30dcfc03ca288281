"""Matrix products."""

from __future__ import annotations

from fxpar.rules.factor_rule import Call, Factors, Group
from fxpar.rules.groups import loop, passes
from fxpar.rules.registry import rule

rule("mm", "m k, k n -> m n", linear=("0", "1"))
rule("bmm", "b m k, b k n -> b m n", linear=("0", "1"))
rule("mv", "m k, k -> m", linear=("0", "1"))
rule("dot", "k, k -> ", linear=("0", "1"))


def added_product(call: Call) -> Factors:
    """``beta * base + alpha * (a @ b)``: the base broadcasts and is added once."""
    rank = len(call.out_shape())
    m, k = call.shape(1)[-2:]
    n = call.shape(2)[-1]
    lead = rank - 2

    def base(out_dim: int) -> dict[int, int]:
        dim = out_dim - rank + len(call.shape(0))
        return {0: dim} if dim >= 0 and call.shape(0)[dim] > 1 else {}

    groups: tuple[Group, ...] = ()
    if lead:
        groups += loop(call, call.out_shape()[0], {**base(0), 1: 0, 2: 0}, {0: 0})
    groups += loop(call, m, {**base(lead), 1: lead}, {0: lead})
    groups += loop(call, n, {**base(lead + 1), 2: lead + 1}, {0: lead + 1})
    groups += loop(call, k, {1: lead + 1, 2: lead}, {}, contract={0: "sum"}, addends=(0,))
    return Factors(groups, passes(call, "01", "02"))


rule(["addmm", "baddbmm"], added_product)
rule("addmv", "m, m k, k -> m", addends=(0,), linear=("01", "02"))
