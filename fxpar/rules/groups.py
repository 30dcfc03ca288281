"""Short ways to write the groups of a rule that is a function of the call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxpar.rules.factor_rule import Call, Group, Linear, Slot
from fxpar.rules.parse import tensor_operands

Region = int | Slot
"""A whole tensor dim by its number, or part of some dims."""


def loop(
    call: Call,
    size: int,
    inputs: Mapping[int, Region],
    outputs: Mapping[int, Region],
    *,
    contract: Mapping[int, str] | None = None,
    addends: Iterable[int] = (),
    nonempty: bool = False,
    soft: bool = False,
    expands: str = "",
    loose: bool = False,
) -> tuple[Group, ...]:
    """The group of a loop of ``size`` over the named regions; none when it has a single turn.

    ``contract`` maps outputs without a region to the pending reduction; the outputs it does not name do not depend on
    the loop.
    """
    if size <= 1:
        return ()
    waiting = contract or {}
    return (
        Group(
            size,
            tuple(_slot(inputs.get(i)) for i in range(len(call.inputs))),
            tuple(None if out is None else _slot(outputs.get(o)) for o, out in enumerate(call.outputs)),
            tuple(None if out is None or o in outputs else waiting.get(o) for o, out in enumerate(call.outputs)),
            tuple(addends) if waiting else (),
            nonempty,
            soft,
            expands,
            loose,
        ),
    )


def _slot(region: Region | None) -> Slot | None:
    return Slot((region,)) if isinstance(region, int) else region


def passes(call: Call, *entries: str) -> tuple[Linear, ...]:
    """Pending sums that pass: ``"01"`` jointly in tensor arguments 0 and 1, ``"0>02"`` to outputs 0 and 2 only.

    Numbers count the tensor arguments of the schema; an entry that names one the call does not pass is dropped.
    ``"0>"`` says that no output reads the values of operand 0.
    """
    operands = tensor_operands(call)
    result = []
    for entry in entries:
        left, arrow, right = entry.partition(">")
        found = tuple(o for c in left if (o := operands[int(c)]) is not None)
        if len(found) == len(left):
            outputs = tuple(int(c) for c in right) if arrow else tuple(range(len(call.outputs)))
            result.append(Linear(found, tuple(o for o in outputs if call.outputs[o] is not None)))
    return tuple(result)


def dims_of(value: object, rank: int) -> tuple[int, ...]:
    """A dim argument (one number, a list, or None / empty for all) as sorted non-negative dims."""
    if value is None or value == ():
        return tuple(range(rank))
    found = value if isinstance(value, tuple) else (value,)
    return tuple(sorted({int(d) % max(rank, 1) for d in found if rank}))
