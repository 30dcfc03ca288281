"""Judging one rule on many calls: draw a call, a mesh and joint choices, run the ranks, count what was seen.

An *example* is one call on one mesh under one joint choice. Calls are drawn until as many examples were judged as were
wanted; then, where asked for, until a share of them left ranks pieces of unequal size, or left some rank nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fxpar.plans.layout import Dims, Layout, Shard, digits
from fxpar.plans.mesh import Mesh
from fxpar.rule_report import Judged
from fxpar.rules.choices import JointChoice, Site
from fxpar.rules.soundness import Counterexample, Example, judged_choices

SHARE = 4
"""Of the wanted examples, one in so many is of every kind of piece that is asked for."""
IDLE = 40
"""Calls in a row without a choice of the kind, after which an op is said to have none."""
ENOUGH = 50
"""Counterexamples after which no more are looked for."""
CHOICES = 16
"""Joint choices run per call."""


@dataclass(frozen=True)
class Shards:
    """Kinds of pieces that are looked for besides those that come by chance: ``uneven``, choices that leave ranks
    pieces of unequal size; ``empty``, choices that leave some rank nothing."""

    uneven: bool = False
    empty: bool = False


ANY = Shards()


def is_uneven(site: Site, choice: JointChoice, mesh: Mesh) -> bool:
    """True when ranks hold pieces of unequal size of some operand or output."""
    return any(len(lengths) > 1 for lengths in all_lengths(site, choice, mesh))


def is_empty(site: Site, choice: JointChoice, mesh: Mesh) -> bool:
    """True when some rank holds nothing of an operand or output that is not empty itself."""
    return any(0 in lengths for lengths in all_lengths(site, choice, mesh))


def all_lengths(site: Site, choice: JointChoice, mesh: Mesh) -> list[frozenset[int]]:
    """Per operand and output that is cut, the numbers of elements that ranks hold."""
    dims = (*site.inputs, *site.outputs)
    layouts = (*choice.inputs, *choice.outputs)
    return [
        piece_lengths(held, layout, mesh) for held, layout in zip(dims, layouts, strict=True)
        if held is not None and any(isinstance(p, Shard) for p in layout)
    ]


@lru_cache(maxsize=4096)
def piece_lengths(dims: Dims, layout: Layout, mesh: Mesh) -> frozenset[int]:
    """Elements that ranks hold of a tensor; nothing for a tensor without elements."""
    if 0 in [atom for row in dims for atom in row]:
        return frozenset()
    found = set()
    for rank in range(mesh.world_size):
        size = 1
        for row in digits(dims, layout, mesh, mesh.coordinates(rank)):
            for digit in row:
                size *= digit.length
        found.add(size)
    return frozenset(found)


@dataclass
class Tally:
    """What was judged so far."""

    calls: int = 0
    examples: int = 0
    uneven: int = 0
    empty: int = 0
    split: int = 0

    def count(self, site: Site, choice: JointChoice, mesh: Mesh) -> None:
        self.examples += 1
        self.uneven += is_uneven(site, choice, mesh)
        self.empty += is_empty(site, choice, mesh)
        self.split += any(name != "." for name in choice.names)


def judge_calls(
    op: str,
    draw: Callable[[int], Example],
    meshes: Sequence[Mesh],
    wanted: int,
    *,
    shards: Shards = ANY,
    least: int = 1,
    place: str = "",
) -> Judged:
    """Judge at least ``wanted`` examples.

    Args:
        op: full name, for the report.
        draw: the call of a turn; turns count from 0 and decide everything else that is drawn.
        meshes: taken in turn.
        wanted: examples; a quarter as many of the kinds of pieces that ``shards`` asks for, if the op has such.
        least: calls drawn at least.
        place: where the call stands, for the report.
    """
    tally, problems, turn = Tally(), list[Counterexample](), 0
    limit = min(CHOICES, -(-wanted // len(meshes)))

    def run(keep: Callable[[Site, JointChoice, Mesh], bool] | None) -> None:
        # one step aside after every round, so that a row of generators meets every mesh
        mesh = meshes[(turn + turn // len(meshes)) % len(meshes)]
        whole = zlib.crc32(str(turn).encode()) % 4 == 3
        tally.calls += 1
        for site, choice, problem in judged_choices(draw(turn), mesh, seed=turn, whole=whole, limit=limit, keep=keep):
            tally.count(site, choice, mesh)
            if problem is not None:
                problems.append(problem)

    while (tally.examples < wanted or turn < max(least, len(meshes))) and turn < 2 * wanted + least:
        if len(problems) >= ENOUGH:
            break
        run(None)
        turn += 1
    for kind, asked in ((is_uneven, shards.uneven), (is_empty, shards.empty)):
        idle = 0
        while asked and idle < IDLE and len(problems) < ENOUGH:
            if (tally.uneven if kind is is_uneven else tally.empty) >= wanted // SHARE:
                break
            before = tally.examples
            run(kind)
            turn += 1
            idle = idle + 1 if tally.examples == before else 0
    return Judged(
        op, tally.calls, tally.examples, tally.uneven, tally.empty, tally.split, place=place, problems=tuple(problems)
    )
