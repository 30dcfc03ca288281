"""The exact minimum of a graph without its memory row, by eliminating variables where that stays cheap.

Bucket elimination (Dechter 1999): summing the factors that mention a variable and minimising it out leaves one factor
over its neighbours. Cheap for chains, trees and narrow graphs with few states; the cost is known before any is paid.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from fxpar.solver.graph import BIG, BLOCKED, Graph, IntArray

#: Entries of the largest factor, and of all factors together, that are still called cheap.
LARGEST_FACTOR = 1_000_000
ALL_FACTORS = 12_000_000


@dataclass(frozen=True, eq=False)
class _Factor:
    """A table over `scope` (variables in ascending order), one axis each."""

    scope: tuple[int, ...]
    values: IntArray


def eliminate(graph: Graph) -> tuple[int, list[int]] | None:
    """The least cost in ns and a choice of positions that has it; None if this graph is too wide.

    A cost at or above BLOCKED says that every assignment is forbidden.
    """
    order = _order(graph)
    return None if order is None else _minimise(graph, order)


def _order(graph: Graph) -> list[int] | None:
    """The elimination order that makes the smallest next factor at every step, or None above the limits."""
    sizes = [len(costs) for costs in graph.costs]
    near: list[set[int]] = [set() for _ in sizes]
    for link in graph.links:
        near[link.u].add(link.v)
        near[link.v].add(link.u)

    def entries(v: int) -> int:
        product = sizes[v]
        for other in near[v]:
            product *= sizes[other]
        return product

    heap = [(entries(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    gone = [False] * len(sizes)
    order: list[int] = []
    spent = 0
    while heap:
        size, v = heapq.heappop(heap)
        if gone[v] or size != entries(v):
            continue
        spent += size
        if size > LARGEST_FACTOR or spent > ALL_FACTORS:
            return None
        gone[v] = True
        order.append(v)
        around = sorted(near[v])
        for a in around:
            near[a].discard(v)
            near[a].update(b for b in around if b != a)
        for a in around:
            heapq.heappush(heap, (entries(a), a))
    return order


def _minimise(graph: Graph, order: list[int]) -> tuple[int, list[int]]:
    place = [0] * graph.size
    for position, v in enumerate(order):
        place[v] = position
    buckets: list[list[_Factor]] = [[_Factor((v,), graph.costs[v])] for v in range(graph.size)]
    for link in graph.links:
        first = link.u if place[link.u] < place[link.v] else link.v
        buckets[first].append(_Factor((link.u, link.v), graph.tables[link.table]))
    minimum = graph.constant
    blocked = False
    best_state: list[_Factor] = []
    for v in order:
        scope = tuple(sorted({u for factor in buckets[v] for u in factor.scope}))
        total: IntArray = np.zeros((1,) * len(scope), dtype=np.int64)
        for factor in buckets[v]:
            shape = [len(graph.costs[u]) if u in factor.scope else 1 for u in scope]
            total = np.minimum(total + factor.values.reshape(shape), BIG)
        axis = scope.index(v)
        rest = scope[:axis] + scope[axis + 1 :]
        best_state.append(_Factor(rest, total.argmin(axis=axis)))
        least = total.min(axis=axis)
        if rest:
            buckets[min(rest, key=lambda u: place[u])].append(_Factor(rest, least))
        else:
            blocked |= int(least) >= BLOCKED
            minimum += int(least)
    choice = [0] * graph.size
    for v, factor in zip(reversed(order), reversed(best_state), strict=True):
        choice[v] = int(factor.values[tuple(choice[u] for u in factor.scope)])
    return (BIG if blocked else minimum), choice
