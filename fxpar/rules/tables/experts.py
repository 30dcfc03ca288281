"""Routed experts kept as one op: ``x [t,d], index [t,k], weight [t,k], up [e,(g f),d], down [e,d,f] -> [t,d]``.

Tokens ``t`` are a loop of all but the experts' weights (data parallel). Experts ``e`` are a loop of the weights alone:
a rank computes the slots that go to the experts it holds, from all the tokens of its group, and the sum over the ranks
is pending. So is that over slots ``k`` and hidden values ``f`` (tensor parallel). The width of the output is a loop of
``down``; the width of ``x`` is contracted before the activation and stays whole.
"""

from __future__ import annotations

from fxpar.plans.program import Arg
from fxpar.rules.factor_rule import Block, Call, Factors, Group, Slot
from fxpar.rules.groups import loop, passes
from fxpar.rules.ops import experts as experts_ops  # noqa: F401  registers the ops
from fxpar.rules.registry import rule
from fxpar.rules.tables.embeddings import flat_digits, is_whole

EXPERTS = "fxpar.experts.default"
EXPERTS_BACKWARD = "fxpar.experts_backward.default"


def _halves(call: Call) -> int:
    """How often a hidden value stands in a column of ``up``."""
    return 2 if call.arg("gated") else 1


def experts(call: Call) -> Factors:
    (tokens, _), (_, slots), (held, width, hidden) = call.shape(0), call.shape(1), call.shape(4)
    groups: tuple[Group, ...] = ()
    groups += loop(call, tokens, {0: 0, 1: 0, 2: 0}, {0: 0})
    groups += loop(call, slots, {1: 1, 2: 1}, {}, contract={0: "sum"})
    groups += loop(call, held, {3: 0, 4: 0}, {}, contract={0: "sum"})
    groups += loop(call, hidden, {3: Slot((1,), _halves(call)), 4: 2}, {}, contract={0: "sum"})
    groups += loop(call, width, {4: 1}, {0: 1})
    return Factors(groups, passes(call, "2", "4"))


def experts_backward(call: Call) -> Factors:
    """``grad, x, index, weight, up, down -> dx, dweight, dup, ddown``; linear in the gradient."""
    (tokens, _), (_, slots), (held, width, hidden) = call.shape(1), call.shape(2), call.shape(5)
    column = Slot((1,), _halves(call))
    groups: tuple[Group, ...] = ()
    groups += loop(call, tokens, {0: 0, 1: 0, 2: 0, 3: 0}, {0: 0, 1: 0}, contract={2: "sum", 3: "sum"})
    groups += loop(call, slots, {2: 1, 3: 1}, {1: 1}, contract={0: "sum", 2: "sum", 3: "sum"})
    groups += loop(call, held, {4: 0, 5: 0}, {2: 0, 3: 0}, contract={0: "sum", 1: "sum"})
    groups += loop(call, hidden, {4: column, 5: 2}, {2: column, 3: 2}, contract={0: "sum", 1: "sum"})
    groups += loop(call, width, {0: 1, 5: 1}, {3: 1}, contract={0: "sum", 1: "sum", 2: "sum"})
    return Factors(groups, passes(call, "0", "3>023", "5>012"))


def local_experts(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    """A rank that holds some experts is told which."""
    operand = call.operand("up")
    row = block.inputs[operand][0] if operand is not None else ()
    return call.op, call.args if is_whole(row) else call.with_args(rows=flat_digits(row))


rule("fxpar::experts", experts, localise=local_experts)
rule("fxpar::experts_backward", experts_backward, localise=local_experts)
