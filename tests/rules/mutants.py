"""Mechanical mutants of a declared rule: each makes one claim of it stronger, so most are unsound."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from fxpar.plans.program import Ref
from fxpar.rules import choices, registry
from fxpar.rules.expansion import Emission
from fxpar.rules.factor_rule import Call, Factors, Group, Linear, Rule, Slot

Change = Callable[[Call, Factors], Factors]


def _groups(change: Callable[[Call, Group], Group]) -> Change:
    return lambda call, factors: Factors(tuple(change(call, g) for g in factors.groups), factors.linear)


def _reduced(old: str, new: str | None) -> Change:
    return _groups(lambda call, g: replace(g, contract=tuple(new if c == old else c for c in g.contract)))


def _unsplit(operand: int) -> Change:
    """Claim that an operand does not carry a loop it carries."""

    def change(call: Call, group: Group) -> Group:
        if operand >= len(group.inputs) or group.inputs[operand] is None:
            return group
        return replace(group, inputs=tuple(None if i == operand else s for i, s in enumerate(group.inputs)))

    return _groups(change)


def _also_linear(operand: int) -> Change:
    """Claim that pending sums of one operand alone pass to every output."""

    def change(call: Call, factors: Factors) -> Factors:
        if operand >= len(call.inputs):
            return factors
        outputs = tuple(o for o, out in enumerate(call.outputs) if out is not None)
        return Factors(factors.groups, (*factors.linear, Linear((operand,), outputs)))

    return change


def _also_split(back: int) -> Change:
    """Claim that a dim which stays whole is a loop: of all operands and outputs that have it at that place."""

    def change(call: Call, factors: Factors) -> Factors:
        if not call.inputs or len(call.shape(0)) < back or call.shape(0)[-back] < 2:
            return factors
        size = call.shape(0)[-back]
        if any(s is not None and len(call.shape(0)) - back in s.dims for g in factors.groups for s in g.inputs[:1]):
            return factors

        def place(shape: tuple[int, ...]) -> Slot | None:
            return Slot((len(shape) - back,)) if len(shape) >= back and shape[-back] == size else None

        inputs = tuple(place(t.shape) for t in call.inputs)
        outputs = tuple(None if out is None else place(out.shape) for out in call.outputs)
        contract = tuple(
            "sum" if out is not None and slot is None else None for out, slot in zip(call.outputs, outputs, strict=True)
        )
        return Factors((*factors.groups, Group(size, inputs, outputs, contract)), factors.linear)

    return change


def _swapped_nesting(call: Call, group: Group) -> Group:
    """Claim that the inner part of a compound dim is the outer one."""

    def swap(slot: Slot | None) -> Slot | None:
        return None if slot is None else Slot(slot.dims, slot.trail, slot.lead)

    return replace(group, inputs=tuple(map(swap, group.inputs)))


CHANGES: dict[str, Change] = {
    "addends are ordinary operands": _groups(lambda call, g: replace(g, addends=())),
    "sums are maxima": _reduced("sum", "max"),
    "sums need no reduction": _reduced("sum", None),
    "maxima are sums": _reduced("max", "sum"),
    "minima are maxima": _reduced("min", "max"),
    "empty pieces are allowed": _groups(lambda call, g: replace(g, nonempty=False)),
    "nesting is swapped": _groups(_swapped_nesting),
    **{f"operand {i} does not carry the loops": _unsplit(i) for i in range(5)},
    **{f"linear in operand {i} alone": _also_linear(i) for i in range(5)},
    **{f"dim -{back} splits too": _also_split(back) for back in (1, 2, 3)},
}


def _without_reductions(rule: Rule) -> Rule:
    """Claim that what ranks find out about their own pieces is true of the whole."""
    expand = rule.expand

    def change(emission: Emission) -> tuple[Ref | None, ...]:
        emission.all_reduce = lambda value, reduce, word: value  # type: ignore[method-assign]
        assert expand is not None
        return expand(emission)

    return replace(rule, expand=change)


def _in_one_step(rule: Rule) -> Rule:
    """Claim that a local call does where several steps are needed."""

    def plain(call: Call) -> Factors:
        factors = rule.factors(call)
        return replace(factors, groups=tuple(replace(g, expands="") for g in factors.groups))

    return replace(rule, factors=plain)


STEPS: dict[str, Callable[[Rule], Rule]] = {
    "nothing is reduced on the way": _without_reductions,
    "one local call does": _in_one_step,
    "any axes may split in steps": lambda rule: replace(rule, offers=None),
}
"""Mutants of how a choice expands."""


def _steps_differ(rule: Rule, label: str, call: Call) -> bool:
    expanding = any(g.expands for g in rule.factors(call).groups)
    if label == "nothing is reduced on the way":
        return expanding and rule.offers is None  # what is offered only at times exchanges pieces, not statistics
    return expanding and (rule.offers is not None or label != "any axes may split in steps")


def changed(rule: Rule, label: str) -> Rule:
    """The mutant of a rule."""
    if label == "the local call is the global one":
        return replace(rule, localise=None)
    if label in STEPS:
        return STEPS[label](rule)
    change = CHANGES[label]
    return replace(rule, factors=lambda call: change(call, rule.factors(call)))


def differs(rule: Rule, label: str, call: Call) -> bool:
    """True when the mutant claims something of this call that the rule does not."""
    if label == "the local call is the global one":
        return rule.localise is not None
    if label in STEPS:
        return _steps_differ(rule, label, call)
    before = rule.factors(call)
    after = CHANGES[label](call, before)
    return bool(offered(call, after) - offered(call, before))


def offered(call: Call, factors: Factors) -> set[Group | Linear]:
    """What of the factors can become a choice: loops that some operand or output carries, sums that lose nothing."""
    loops = {g for g in factors.groups if any(slot is not None for slot in (*g.inputs, *g.outputs))}
    return loops | {entry for entry in factors.linear if choices.keeps_sums(call, entry)}


LABELS = (*CHANGES, *STEPS, "the local call is the global one")


@contextlib.contextmanager
def without(op: str) -> Iterator[None]:
    """The registry without the rule of an op."""
    declared = registry._RULES.pop(op)
    registry.rules_changed()
    try:
        yield
    finally:
        registry._RULES[op] = declared
        registry.rules_changed()


@contextlib.contextmanager
def in_force(rule: Rule) -> Iterator[None]:
    """The registry with this rule in place of the declared one of its op."""
    declared = registry._RULES[rule.op]
    registry._RULES[rule.op] = rule
    registry.rules_changed()
    try:
        yield
    finally:
        registry._RULES[rule.op] = declared
        registry.rules_changed()
