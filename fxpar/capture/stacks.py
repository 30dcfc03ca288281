"""Stacks of repeated layers as names: ``model.layers.0 ... model.layers.79``, cut into units that repeat.

    layers   0 | 1 2 | 3 4 | 5 6 | 7 8 | 9        first 1, period 2, units 4: layer 0 and layer 9 stand apart
    unit         0     1     2     3
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """``units`` units of ``period`` layers each, numbered children of the module at ``path``, from ``first`` on."""

    path: str
    first: int
    period: int
    units: int

    @property
    def end(self) -> int:
        """The number of the first layer after the last unit."""
        return self.first + self.period * self.units


@dataclass(frozen=True)
class Place:
    """A dotted name that goes through a layer of a stack: ``stack`` and ``unit`` (None for a layer that stands apart),
    ``layer`` within the unit (counted from the end of the units for those after them), ``rest`` of the name."""

    stack: int
    unit: int | None
    layer: int
    rest: str


def place_of(name: str, stacks: tuple[Stack, ...]) -> Place | None:
    """Where a dotted name belongs; None for a name outside of every stack."""
    for index, stack in enumerate(stacks):
        prefix = f"{stack.path}." if stack.path else ""
        if not name.startswith(prefix):
            continue
        digits, dot, tail = name[len(prefix) :].partition(".")
        if not digits.isdecimal():
            continue
        number = int(digits)
        if stack.first <= number < stack.end:
            unit, layer = divmod(number - stack.first, stack.period)
            return Place(index, unit, layer, dot + tail)
        if number >= stack.end:
            return Place(index, None, number - stack.end, dot + tail)
        return None  # before the units: its name never changes
    return None


def name_at(place: Place, stacks: tuple[Stack, ...]) -> str:
    """Inverse of :func:`place_of`, in stacks of other lengths."""
    stack = stacks[place.stack]
    prefix = f"{stack.path}." if stack.path else ""
    start = stack.end if place.unit is None else stack.first + place.unit * stack.period
    return f"{prefix}{start + place.layer}{place.rest}"
