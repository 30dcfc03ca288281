"""Largest and smallest values with their places, and running sums, along a dim that is cut.

    argmax   best = all_reduce(max of the ranks' largest); place = all_reduce(min of the places that hold it)
    cumsum   totals = all_gather(the pieces' totals); local running sums from the sum of those before

Of equal values the first place wins, as in torch's kernels.
"""

from __future__ import annotations

from math import prod
from typing import Literal

from fxpar.plans.program import Dtype, Ref
from fxpar.rules.expansion import Emission
from fxpar.rules.factor_rule import Call
from fxpar.rules.ops import place_parts  # noqa: F401  registers the ops

PLACED = "placed"
RUNNING = "running"


def split_extreme(e: Emission) -> tuple[Ref | None, ...]:
    """``argmax``, ``argmin``, ``max.dim`` and ``min.dim``."""
    call = e.call
    largest = "max" in call.op
    rank = len(call.shape(0))
    dim = None if call.arg("dim") is None else call.arg("dim") % rank
    rows = e.block.inputs[0] if dim is None else (e.block.inputs[0][dim],)
    digits = tuple(n for row in rows for d in row for n in (d.size, d.start, d.length))
    count = prod(call.shape(0)) if dim is None else call.shape(0)[dim]
    value, place = e.op("fxpar.extreme_place.default", Ref(0), dim, largest, digits, count)
    reduce: Literal["max", "min"] = "max" if largest else "min"
    best = e.all_reduce(value, reduce, PLACED)
    (mine,) = e.op("fxpar.place_if_best.default", value, place, best, count)
    first = e.all_reduce(mine, "min", PLACED)
    made = (first,) if len(call.outputs) == 1 else (best, first)
    if call.arg("keepdim"):
        return made
    shape = () if dim is None else tuple(n for d, n in enumerate(e.shape(first)) if d != dim)
    return tuple(e.op("aten.view.default", v, shape)[0] for v in made)


def split_cumsum(e: Emission) -> tuple[Ref | None, ...]:
    """``cumsum`` over one axis."""
    call = e.call
    dim = call.arg("dim") % len(call.shape(0))
    made = call.outputs[0]
    assert made is not None
    kind = Dtype(made.dtype)
    (axis,) = e.axes(RUNNING)
    (total,) = e.op("aten.sum.dim_IntList", Ref(0), (dim,), True, kind)
    totals = e.all_gather(total, dim, axis)
    return e.op("fxpar.cumsum_after.default", Ref(0), totals, dim, e.coords[axis], kind)


def over_one_axis(call: Call, words: tuple[str, ...], sizes: tuple[int, ...]) -> bool:
    """True when a single axis splits a loop that expands."""
    return sum(bool(word) for word in words) == 1
