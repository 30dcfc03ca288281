"""How much of each value's communication a step waits for, and a problem priced by that.

The solver's problem counts every collective in full, one after the other. In the step much of it runs beside compute:
gatherings of parameters are issued early, reductions of gradients wait for nothing. The replay says which collectives
were on the link while compute stood still; the rest cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fxpar.formulate import Formulation
from fxpar.plans.plan import Decisions
from fxpar.prices import Prices
from fxpar.replay_memory import bytes_of
from fxpar.runtime.local import LocalProgram
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.simulate import Watched, replay_time
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
        parts = {k: (v + (PARTS if before is None else before.parts.get(k, PARTS)) + 1) // 2
                 for k, v in self.parts.items()}
        of_kind = {k: (v + (PARTS if before is None else before.of_kind.get(k, PARTS)) + 1) // 2
                   for k, v in self.of_kind.items()}
        return Exposed(parts, of_kind)


def waited_for(local: LocalProgram, prices: Prices) -> dict[int, tuple[int, int]]:
    """Per program value (ns that a step waits for its collectives, ns that they take).

    Where compute stands still it waits for whatever is on the link meanwhile, also for what only delays the collective
    it needs. A bucket's time is shared out by bytes.
    """
    watched = Watched([], [])
    replay_time(local, prices, watched)
    waits = [0] * len(watched.sent)
    first = 0
    for start, end in watched.stalls:
        while first < len(watched.sent) and watched.sent[first][1] <= start:
            first += 1
        for index in range(first, len(watched.sent)):
            begin, done, _ = watched.sent[index]
            if begin >= end:
                break
            waits[index] += min(done, end) - max(begin, start)
    waited: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    for (begin, done, step), wait in zip(watched.sent, waits, strict=True):
        sizes = [bytes_of(local.types[v]) for v in step.outputs]
        whole = max(sum(sizes), 1)
        for value, size in zip(step.outputs, sizes, strict=True):
            origin = local.origins[value][0]
            waited[origin] += wait * size // whole
            taken[origin] += (done - begin) * size // whole
    return {value: (waited[value], time) for value, time in taken.items() if value >= 0 and time}


def exposed(formulation: Formulation, decisions: Decisions, prices: Prices) -> Exposed:
    """What the decisions' step waits for."""
    program = formulation.program
    local = rewrite(program, decisions, (0,) * len(decisions.mesh.axes), every_pass=False)
    source = sources(program, formulation.classes)
    waited: Counter[Key] = Counter()
    taken: Counter[Key] = Counter()
    for value, (wait, time) in waited_for(local, prices).items():
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
