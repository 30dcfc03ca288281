"""From messages to assignments, and from assignments to better ones by moving one variable at a time.

All choices here are lists of positions in a Graph. Sums at or above BLOCKED contain something forbidden.
"""

import numpy as np

from fxpar.solver.arcs import Arcs, all_states
from fxpar.solver.bound import Passing
from fxpar.solver.graph import BIG, BLOCKED, Graph, IntArray

#: A few passes reach a fixed point; more would only meet cycles of equal cost.
DESCENT_PASSES = 8


def decode(passing: Passing, costs: list[IntArray], arcs: Arcs) -> list[int] | None:
    """Picks states in order, each the cheapest given the earlier picks and the messages from later variables.

    Forbidden pairs are propagated after every pick. Returns None where that ends in a variable without states.
    """
    graph, tables = passing.scaled.graph, passing.scaled.tables
    live = all_states(graph)
    choice = [0] * graph.size
    decided = [False] * graph.size
    for v in range(graph.size):
        total = costs[v]
        for position, _ in passing.earlier[v]:
            link = graph.links[position]
            total = np.minimum(total + tables[link.table][choice[link.u]], BIG)
        for position, _ in passing.later[v]:
            total = total + passing.down[position]
        if arcs.links_of[v]:
            choice[v] = int(np.where(live[v], total, BIG).argmin())
            if not arcs.assign(live, v, choice[v], decided):
                return None
        else:
            choice[v] = int(total.argmin())
    return choice


class Neighbourhood:
    """The cost of every state of every variable given the present choice of the others, kept up to date."""

    def __init__(self, graph: Graph, tables: tuple[IntArray, ...], costs: list[IntArray], choice: list[int]) -> None:
        self.graph = graph
        self.tables = tables
        self.costs = costs
        self.choice = list(choice)
        self.memory = graph.weight(choice)

    def around(self, v: int) -> IntArray:
        """[states of v]: own cost plus the cost of all links of v."""
        total = self.costs[v]
        for position in self.graph.links_of[v]:
            link = self.graph.links[position]
            table = self.tables[link.table]
            total = total + (table[:, self.choice[link.v]] if link.u == v else table[self.choice[link.u]])
            # Forbidden entries of many links must not add up to an overflow.
            total = np.minimum(total, BIG)
        return total

    def move(self, v: int, state: int) -> None:
        self.memory += int(self.graph.memory[v][state]) - int(self.graph.memory[v][self.choice[v]])
        self.choice[v] = state

    def descend(self, budget: int | None) -> None:
        """Moves single variables to cheaper (or equal and smaller) states that keep memory within `budget`."""
        todo = [True] * self.graph.size
        for _ in range(DESCENT_PASSES):
            moved = False
            for v in range(self.graph.size):
                if not todo[v] and budget is None:
                    continue
                todo[v] = False
                total = self.around(v)
                if budget is not None:
                    room = int(self.graph.memory[v][self.choice[v]]) + max(budget - self.memory, 0)
                    total = np.where(self.graph.memory[v] <= room, total, BIG)
                # The first of equal states: a tie moves to the smaller one.
                best = int(total.argmin())
                if best != self.choice[v]:
                    self.move(v, best)
                    moved = True
                    for position in self.graph.links_of[v]:
                        link = self.graph.links[position]
                        todo[link.v if link.u == v else link.u] = True
            if not moved:
                return

    def fit(self, budget: int) -> bool:
        """Gives up cost for memory, the cheapest exchange first, until `budget` holds. False if single moves do not."""
        offers: list[tuple[float, int] | None] = [self._offer(v, budget) for v in range(self.graph.size)]
        for _ in range(4 * self.graph.size):
            if self.memory <= budget:
                return True
            best: tuple[float, int, int] | None = None
            for v, offer in enumerate(offers):
                if offer is not None and (best is None or offer[0] < best[0]):
                    best = (offer[0], v, offer[1])
            if best is None:
                return False
            _, v, state = best
            self.move(v, state)
            offers[v] = self._offer(v, budget)
            for position in self.graph.links_of[v]:
                link = self.graph.links[position]
                other = link.v if link.u == v else link.u
                offers[other] = self._offer(other, budget)
        return self.memory <= budget

    def _offer(self, v: int, budget: int) -> tuple[float, int] | None:
        """The state of v that frees memory at the least cost per unit still missing."""
        saved = self.graph.memory[v][self.choice[v]] - self.graph.memory[v]
        total = self.around(v)
        possible = np.flatnonzero((saved > 0) & (total < BLOCKED))
        if not len(possible):
            return None
        useful = np.minimum(saved[possible], max(self.memory - budget, 1))
        rate = (total[possible] - total[self.choice[v]]) / useful
        best = int(rate.argmin())
        return float(rate[best]), int(possible[best])
