"""How long the gathered copies of a plan's parameters live, and the ZeRO stage people call that.

    stored whole                          no copy (data parallel, ZeRO-0)
    stored cut, copy kept until backward  gathered once a step: ZeRO-2 with the master and its optimizer state cut, too
    stored cut, gathered in each half     ZeRO-3

With microbatches each of them gathers anew, unless copies are held through the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxpar.cost.op_work import TensorShape, tensor_bytes
from fxpar.layers import layer_key
from fxpar.plans.errors import FxparError
from fxpar.plans.layout import Layout, Shard, largest_size
from fxpar.plans.lifetimes import parameter_hubs, parameter_roots
from fxpar.plans.plan import Plan
from fxpar.plans.program import node_inputs
from fxpar.rules.choices import choice_by_names, site_of

Life = Literal["gathered once, kept until backward", "gathered in forward and again in backward",
               "gathered in forward only", "gathered in backward only",
               "gathered once a step, kept through all microbatches"]
KEPT: Life = "gathered once, kept until backward"
TWICE: Life = "gathered in forward and again in backward"
FORWARD: Life = "gathered in forward only"
BACKWARD: Life = "gathered in backward only"
HELD: Life = "gathered once a step, kept through all microbatches"

_DAMAGED = (ArithmeticError, AttributeError, FxparError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class ParameterCopy:
    """The copy of one parameter that both halves read. ``bytes``: of the copy, per device."""

    name: str
    life: Life
    bytes: int


def parameter_copies(plan: Plan) -> tuple[ParameterCopy, ...]:
    """The parameters that both halves read and at least one gathers, in order; none for a damaged file."""
    try:
        return tuple(_copies(plan))
    except _DAMAGED:
        return ()


def _copies(plan: Plan) -> list[ParameterCopy]:
    program, decisions = plan.program, plan.decisions
    roots = parameter_roots(program)
    names = {i.value: i.name for i in program.inputs}
    stored = {i.value: lay for i, lay in zip(program.inputs, decisions.inputs, strict=True)}
    producer = {v: n for n, node in enumerate(program.nodes) for v in node.outputs if v >= 0}
    reused = frozenset(decisions.reuse)
    held = {program.inputs[i].value for i in decisions.held}
    found = []
    for b, f in sorted(parameter_hubs(program).items(), key=lambda pair: pair[1]):
        value = node_inputs(program.nodes[f])[0]
        have = stored.get(value) or _layout(plan, producer[value])
        early, late = _layout(plan, f), _layout(plan, b)
        gathers = _gathers(have, early), _gathers(have, late)
        if not any(gathers):
            continue
        kept = early if gathers[0] else late
        size = largest_size(program.dims[value], kept, decisions.mesh)
        life = (KEPT if b in reused else TWICE) if all(gathers) else FORWARD if gathers[0] else BACKWARD
        if roots[value] in held:
            life = HELD
        found.append(ParameterCopy(names[roots[value]], life, tensor_bytes(
            TensorShape((size,), program.types[value].dtype))))
    return found


def _layout(plan: Plan, node: int) -> Layout:
    """The layout of a node's first result."""
    program, decisions = plan.program, plan.decisions
    choice = choice_by_names(site_of(program.nodes[node], program), decisions.choices[node], decisions.mesh)
    if choice is None:
        raise ValueError(f"node {node} has a choice that its rule does not offer")
    return choice.outputs[0]


def _gathers(have: Layout, want: Layout) -> bool:
    return any(isinstance(a, Shard) and not isinstance(b, Shard) for a, b in zip(have, want, strict=True))


def zero_words(copies: tuple[ParameterCopy, ...]) -> str:
    """The ZeRO stage that the copies' lifetimes are like, empty without any. (Of microbatches: what each does.)"""
    if copies and all(c.life == HELD for c in copies):
        return "as in ZeRO-1 and ZeRO-2: gathered once a step"
    kept = sum(c.bytes for c in copies if c.life == KEPT)
    again = sum(c.bytes for c in copies if c.life == TWICE)
    if not kept and not again:
        return ""
    if not again:
        return "as in ZeRO-2: gathered once a step"
    if not kept:
        return "as in ZeRO-3: freed after each half"
    return f"between ZeRO-2 and ZeRO-3: {kept / (kept + again):.0%} of the bytes gathered in both are gathered once"


def copy_rows(copies: tuple[ParameterCopy, ...]) -> list[tuple[str, str, int, int]]:
    """(names with layer numbers starred, life, how many, bytes of all) of equal lives, in order."""
    rows: dict[tuple[Life, str], tuple[int, int]] = {}
    for copy in copies:
        key = copy.life, layer_key(copy.name)
        count, total = rows.get(key, (0, 0))
        rows[key] = count + 1, total + copy.bytes
    return [(name, life, count, total) for (life, name), (count, total) in rows.items()]
