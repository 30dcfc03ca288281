"""Where the values of a program come from, in terms of classes."""

from __future__ import annotations

from dataclasses import dataclass

from fxpar.layers import Classes
from fxpar.plans.program import Program


@dataclass(frozen=True)
class Source:
    """Where a value comes from: the class that makes it and which of its outputs it is (0 for inputs)."""

    owner: int
    output: int


def sources(program: Program, classes: Classes) -> dict[int, Source]:
    """Per value, its source."""
    result = {item.value: Source(c, 0) for item, c in zip(program.inputs, classes.inputs, strict=True)}
    for node, c in zip(program.nodes, classes.nodes, strict=True):
        result.update({v: Source(c, o) for o, v in enumerate(node.outputs) if v >= 0})
    return result
