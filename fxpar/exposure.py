"""How much of each value's communication a step waits for, and a problem priced by that.

The solver's problem counts every collective in full, one after the other. In the step much of it runs beside compute:
gatherings of parameters are issued early, reductions of gradients wait for nothing. The replay says which collectives
were on the link while compute stood still; the rest cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from fxpar.formulate import Formulation
from fxpar.solver.problem import FORBIDDEN, IntArray, Problem
from fxpar.sources import sources

PARTS = 16
"""Fractions are whole numbers of 1 / this."""

Key = tuple[int, int]
"""The class that makes a value, and which of its outputs it is."""


@dataclass(frozen=True)
class Exposed:
    """Of the communication of values: ``parts`` of PARTS that the step waits for, per value; of parameters' gatherings
    and gradients' reductions that the plan has none of, as ``of_kind`` of their kind on average."""

    parts: Mapping[Key, int]
    of_kind: Mapping[str, int]

    def damped(self, before: Exposed | None) -> Exposed:
        """Half way from what was taken before (all of it, at first)."""
        if before is None:
            before = Exposed({}, {})
        return Exposed(_halfway(self.parts, before.parts), _halfway(self.of_kind, before.of_kind))


K = TypeVar("K")


def _halfway(parts: Mapping[K, int], before: Mapping[K, int]) -> dict[K, int]:
    return {key: (part + before.get(key, PARTS) + 1) // 2 for key, part in parts.items()}


def exposed(formulation: Formulation, waited_for: Mapping[int, tuple[int, int]]) -> Exposed:
    """What a step waits for; ``waited_for``: per program value, as its replay found it (``Replayed.waited``)."""
    source = sources(formulation.program, formulation.classes)
    waited: Counter[Key] = Counter()
    taken: Counter[Key] = Counter()
    for value, (wait, time) in waited_for.items():
        key = source[value].owner, source[value].output
        waited[key] += wait
        taken[key] += time
    kinds: dict[str, set[Key]] = {}
    for use in formulation.uses:
        if use is not None and use.kind != "reshard":
            kinds.setdefault(use.kind, set()).add((use.owner, use.output))
    of_kind = {
        kind: _parts(sum(waited[k] for k in keys), sum(taken[k] for k in keys)) for kind, keys in sorted(kinds.items())
    }
    return Exposed({key: _parts(waited[key], time) for key, time in taken.items()}, of_kind)


def _parts(waited: int, taken: int) -> int:
    """Rounded up: what is waited for is never free. What is not there counts in full."""
    return min(PARTS, -(-PARTS * waited // taken)) if taken else PARTS


def repriced(formulation: Formulation, shown: Exposed) -> Problem:
    """The problem in which reshards cost what the step would wait for."""
    problem = formulation.problem
    known: dict[tuple[int, int], int] = {}
    tables: list[IntArray] = list(problem.tables)
    edges = []
    for edge, use in zip(problem.edges, formulation.uses, strict=True):
        parts = PARTS
        if use is not None:
            parts = shown.parts.get((use.owner, use.output), shown.of_kind.get(use.kind, PARTS))
        if parts == PARTS:
            edges.append(edge)
            continue
        if (edge.table, parts) not in known:
            table = problem.tables[edge.table]
            barred = table >= FORBIDDEN
            known[edge.table, parts] = len(tables)
            tables.append(np.where(barred, FORBIDDEN, np.where(barred, 0, table) * parts // PARTS))
        edges.append(replace(edge, table=known[edge.table, parts]))
    used = sorted({edge.table for edge in edges})
    place = {table: i for i, table in enumerate(used)}
    return Problem(problem.variables, tuple(replace(e, table=place[e.table]) for e in edges),
                   tuple(tables[t] for t in used), problem.budget)
