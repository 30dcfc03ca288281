"""The rule language: ``"m k, k n -> m n"`` becomes factor groups of a call.

Operands and outputs are separated by commas, dims by spaces. A name is a factor; ``name!`` stays whole; ``...`` stands
for any leading dims, aligned from the right across operands; ``1`` is a dim of size 1; ``(a b)`` is a compound dim,
major first; ``_`` is a dim that takes no part. Operands are the call's tensor arguments in schema order; an optional
tensor that is not passed is skipped, so a rule names all of them. A factor of size 1 in an operand broadcasts.

A factor missing from an output is contracted: splitting it leaves that output pending (``reduce``). ``reads`` says
which operands an output depends on (default: all), ``addends`` which operands are added once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fxpar.plans.errors import FxparError
from fxpar.rules.factor_rule import Call, Factors, Group, Linear, Slot, argument_names, torch_op


class RuleMismatch(FxparError, ValueError):
    """A rule text does not fit a call of its op."""


_TOKEN = re.compile(r"\(([^()]*)\)|(\S+)")


@dataclass(frozen=True)
class Dim:
    """One dim of a parsed operand: its factor names (several for a compound) and which of them stay whole."""

    names: tuple[str, ...]
    whole: tuple[bool, ...]


@cache
def parse_side(text: str) -> tuple[tuple[Dim, ...], ...]:
    """``"m k, k n"`` -> per operand its dims. An empty operand is a scalar."""
    return tuple(
        tuple(
            _dim((compound or single).split())
            for compound, single in _TOKEN.findall(operand)
        )
        for operand in text.split(",")
    )


def _dim(words: list[str]) -> Dim:
    return Dim(tuple(w.rstrip("!") for w in words), tuple(w.endswith("!") or w in ("1", "_") for w in words))


def string_factors(
    call: Call,
    text: str,
    *,
    linear: Sequence[str] = (),
    reduce: str = "sum",
    reads: Sequence[str] | None = None,
    addends: Sequence[int] = (),
    nonempty: bool = False,
) -> Factors:
    """Factor groups of ``call`` under the rule text.

    ``linear`` entries are operand numbers as digits (``"01"``: jointly in 0 and 1), optionally ``"0>02"`` (passes to
    outputs 0 and 2 only). Numbers count the rule's operands, passed or not.

    Raises:
        RuleMismatch: the text does not fit the call (operand count, number of dims, sizes).
    """
    left, _, right = text.partition("->")
    sides_in, sides_out = parse_side(left), parse_side(right)
    operands = tensor_operands(call)
    if len(operands) != len(sides_in) or len(call.outputs) != len(sides_out):
        found = f"{len(operands)} operands, {len(call.outputs)} outputs"
        raise RuleMismatch(f"rule '{text}' of {call.op} does not fit {found}")
    ellipsis = max(
        [len(call.inputs[o].shape) - len(s) + 1 for o, s in zip(operands, sides_in, strict=True)
         if o is not None and any(d.names == ("...",) for d in s)] or [0]
    )
    places_in: list[dict[str, Slot]] = [{} for _ in call.inputs]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    shapes = [(call.inputs[o].shape, side) for o, side in zip(operands, sides_in, strict=True) if o is not None]
    shapes += [(out.shape, side) for out, side in zip(call.outputs, sides_out, strict=True) if out is not None]
    # plain dims of every operand first: they tell the parts of compound dims wherever those stand
    for compound in (False, True):
        for shape, side in shapes:
            _learn_sizes(shape, _expanded(shape, side, ellipsis, call, text), sizes, call, text, compound)
    for operand, side in zip(operands, sides_in, strict=True):
        if operand is not None:
            places_in[operand] = _places(call.inputs[operand].shape, side, ellipsis, sizes, whole, call, text)
    places_out = [
        {} if out is None else _places(out.shape, side, ellipsis, sizes, whole, call, text)
        for out, side in zip(call.outputs, sides_out, strict=True)
    ]
    readers = [
        {operands[int(c)] for c in reads[o]} if reads is not None else set(operands) for o in range(len(call.outputs))
    ]
    groups = []
    for name, size in sizes.items():
        if size == 1 or name in whole:
            continue
        slots_in = tuple(p.get(name) for p in places_in)
        slots_out = tuple(p.get(name) for p in places_out)
        having = {i for i, s in enumerate(slots_in) if s is not None}
        contract = tuple(
            reduce if having and slot is None and having & readers[o] else None for o, slot in enumerate(slots_out)
        )
        added = tuple(
            operand for a in addends
            if (operand := operands[a]) is not None and slots_in[operand] is None and any(contract)
        )
        groups.append(Group(size, slots_in, slots_out, contract, added, nonempty))
    return Factors(tuple(groups), tuple(_linear(entry, operands, len(call.outputs)) for entry in linear
                                        if all(operands[int(c)] is not None for c in entry.partition(">")[0])))


def tensor_operands(call: Call) -> list[int | None]:
    """Per tensor argument of the schema, its operand number (None when not passed). Lists of tensors are refused."""
    kinds = [str(a.type) for a in torch_op(call.op)._schema.arguments]
    if any(k.startswith(("List[Tensor", "List[Optional[Tensor")) for k in kinds):
        raise RuleMismatch(f"{call.op} takes a list of tensors: its rule must be a function")
    return [
        call.operand(name) for name, kind in zip(argument_names(call.op), kinds, strict=True)
        if kind in ("Tensor", "Optional[Tensor]")
    ]


def _linear(entry: str, operands: list[int | None], outputs: int) -> Linear:
    left, _, right = entry.partition(">")
    inputs = tuple(o for c in left if (o := operands[int(c)]) is not None)
    return Linear(inputs, tuple(int(c) for c in right) if right else tuple(range(outputs)))


def _expanded(
    shape: tuple[int, ...], side: tuple[Dim, ...], ellipsis: int, call: Call, text: str
) -> tuple[Dim, ...]:
    """The dims of an operand with ``...`` written out; ``ellipsis`` is the longest run of any operand."""
    result: list[Dim] = []
    for dim in side:
        if dim.names[0] == "...":
            count = len(shape) - len(side) + 1
            result += [Dim((f"...{ellipsis - count + i}",), (dim.whole[0],)) for i in range(count)]
        else:
            result.append(dim)
    if len(result) != len(shape):
        raise RuleMismatch(f"rule '{text}' of {call.op} does not fit an operand of shape {shape}")
    return tuple(result)


def _learn_sizes(
    shape: tuple[int, ...], dims: tuple[Dim, ...], sizes: dict[str, int], call: Call, text: str, compound: bool
) -> None:
    """Sizes of the factors of plain dims, or of the parts of compound dims of which at most one is unknown."""
    for dim, size in zip(dims, shape, strict=True):
        if compound != (len(dim.names) > 1):
            continue
        if not compound:
            name = dim.names[0]
            if name in ("1", "_") or size == 1:
                sizes.setdefault(name, 1)
            elif sizes.get(name, 1) not in (1, size):
                raise RuleMismatch(f"rule '{text}' of {call.op}: {name} is {sizes[name]} and {size}")
            else:
                sizes[name] = size
            continue
        unknown = [name for name in dim.names if name not in sizes]
        known = math.prod(sizes[name] for name in dim.names if name in sizes)
        if len(unknown) == 1 and known and size % known == 0:
            sizes[unknown[0]] = size // known
        if any(name not in sizes for name in dim.names) or math.prod(sizes[name] for name in dim.names) != size:
            raise RuleMismatch(f"rule '{text}' of {call.op}: cannot tell the parts of a compound dim of size {size}")


def _places(
    shape: tuple[int, ...], side: tuple[Dim, ...], ellipsis: int, sizes: dict[str, int], whole: set[str], call: Call,
    text: str,
) -> dict[str, Slot]:
    """Where an operand has its factors; one that stands twice in an operand joins ``whole``, as do those marked so."""
    places: dict[str, Slot] = {}
    for axis, (dim, size) in enumerate(zip(_expanded(shape, side, ellipsis, call, text), shape, strict=True)):
        parts = [size] if len(dim.names) == 1 else [sizes[name] for name in dim.names]
        for position, (name, kept, part) in enumerate(zip(dim.names, dim.whole, parts, strict=True)):
            if kept or name in places:
                whole.add(name)
            if part > 1:
                places[name] = Slot((axis,), math.prod(parts[:position]), math.prod(parts[position + 1 :]))
    return places
