"""The deletion filter: of demands that cannot be met together, a set of which no member can be spared.

Chinneck and Dravnieks, "Locating minimal infeasible constraint sets in linear programs" (1991): leave out one after the
other, and for good when what is left is still impossible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def minimal_set(members: Sequence[T], possible: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A part of ``members`` that is impossible, and possible without any one of it; in their order.

    Args:
        members: an impossible set.
        possible: asked of parts of ``members``, in their order. Where it is not monotone (leaving one out may make
            things worse) the result is minimal all the same: every member is tried again until none can go.
    """
    kept = tuple(members)
    while True:
        before = len(kept)
        for member in kept:
            rest = tuple(other for other in kept if other is not member)
            if not possible(rest):
                kept = rest
        if len(kept) == before:
            return kept
