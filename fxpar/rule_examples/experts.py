"""Generators of calls of routed experts."""

from __future__ import annotations

from typing import Any

from fxpar.rule_examples.draw import Draw, calls
from fxpar.rules.ops.experts import ACTIVATIONS
from fxpar.rules.soundness import Example, example


def experts_call(draw: Draw) -> dict[str, Any]:
    """Slots of a token go to distinct experts, as a router sends them; some experts get none."""
    tokens, slots, held = draw.size(1, 6), draw.size(1, 3), draw.size(3, 5)
    width, hidden, gated = draw.size(1, 5), draw.size(1, 5), draw.chance(0.7)
    return {
        "x": draw.real(tokens, width),
        "index": draw.unique_rows(held, tokens, slots, dim=1),
        "weight": draw.unit(tokens, slots),
        "up": draw.real(held, hidden * (2 if gated else 1), width),
        "down": draw.real(held, width, hidden),
        "act": draw.pick(*ACTIVATIONS),
        "gated": gated,
        "experts": held,
        "rows": [],
    }


@calls("fxpar::experts")
def experts(draw: Draw) -> Example:
    return example("fxpar::experts", **experts_call(draw))


@calls("fxpar::experts_backward")
def experts_backward(draw: Draw) -> Example:
    call = experts_call(draw)
    return example("fxpar::experts_backward", grad=draw.real(*call["x"].shape), **call)
