"""Where to start message passing: what it ended with on another graph of the same variables.

Graphs of one problem, or of problems that differ in budget, in memory or a little in cost, keep different states and
move different terms out of their tables. A start is written in terms of the whole tables, so any can take it up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fxpar.solver.bound import Messages, Passing, Scaled
from fxpar.solver.graph import BIG, BoolArray, Graph, IntArray
from fxpar.solver.problem import Problem

#: Added to the cost of states that a start does not know: no message is made from them in the first sweep.
UNKNOWN = BIG >> 8


@dataclass(frozen=True, eq=False)
class Prepared:
    """What was made of a problem before its memory mattered, for another that differs in memory and budget alone.

    order     the variables in the order in which they are solved; all below is in terms of it.
    whole     the problem's Graph; `live` its states that can be part of anything, `graph` with these alone.
    """

    problem: Problem
    order: tuple[int, ...]
    whole: Graph
    live: tuple[BoolArray, ...]
    graph: Graph
    scaled: Scaled

    def serves(self, problem: Problem) -> bool:
        """True when `problem` has the very same edges, tables and costs."""
        mine = self.problem
        return (
            problem.tables is mine.tables and problem.edges is mine.edges
            and len(problem.variables) == len(mine.variables)
            and all(a.costs is b.costs for a, b in zip(problem.variables, mine.variables, strict=True))
        )


@dataclass(frozen=True, eq=False)
class Start:
    """Messages in units of 2**-shift ns, and the price of memory (ns per unit).

    states    per variable the state numbers of the Problem that messages speak of.
    messages  [u, v]: for each of `states[u]` what came from v, with the whole table counted.
    """

    price: Fraction
    shift: int
    states: tuple[IntArray, ...]
    messages: dict[tuple[int, int], IntArray]
    prepared: Prepared | None = None

    def renamed(self, order: Sequence[int]) -> "Start":
        """The same with variable `order[i]` for i."""
        states = list(self.states)
        for v, own in zip(order, self.states, strict=True):
            states[v] = own
        messages = {(order[u], order[v]): message for (u, v), message in self.messages.items()}
        return Start(self.price, self.shift, tuple(states), messages, self.prepared)


def start_from(scaled: Scaled, messages: Messages, price: int) -> Start:
    """What `messages` of a graph, at `price`, say in terms of the Problem's tables."""
    graph = scaled.graph
    found: dict[tuple[int, int], IntArray] = {}
    for (u, v), (rows, columns) in graph.moved.items():
        found[u, v], found[v, u] = rows << scaled.shift, columns << scaled.shift
    for link, down, up in zip(graph.links, messages.down, messages.up, strict=True):
        for pair, message in (((link.u, link.v), down), ((link.v, link.u), up)):
            found[pair] = found[pair] + message if pair in found else message
    return Start(scaled.rational(price), scaled.shift, graph.states, found)


def resumed(scaled: Scaled, passing: Passing, start: Start, costs: list[IntArray]) -> None:
    """Puts the messages of a start into `passing` and sweeps once at `costs`, without the states it does not know."""
    graph = scaled.graph
    places, known = [], []
    for mine, its in zip(graph.states, start.states, strict=True):
        place = np.minimum(np.searchsorted(its, mine), len(its) - 1)
        places.append(place)
        known.append(its[place] == mine)
    for position, link in enumerate(graph.links):
        message = start.messages.get((link.u, link.v))
        if message is None:
            continue
        rows = graph.moved[link.u, link.v][0] if (link.u, link.v) in graph.moved else np.zeros(1, np.int64)
        taken = _shifted(message[places[link.u]], scaled.shift - start.shift) - (rows << scaled.shift)
        passing.down[position] = np.where(known[link.u], taken, 0)
    passing.sweep([np.where(mask, own, own + UNKNOWN) for mask, own in zip(known, costs, strict=True)])
    for position, link in enumerate(graph.links):
        # a state that only unknown ones can accompany was told of their penalty: it would take many sweeps to forget
        passing.down[position] = _capped(passing.down[position], known[link.u])
        passing.up[position] = _capped(passing.up[position], known[link.v])


def _capped(message: IntArray, known: BoolArray) -> IntArray:
    return np.where(known, message, np.minimum(message, message[known].max())) if known.any() else message


def _shifted(values: IntArray, by: int) -> IntArray:
    return values << by if by >= 0 else values >> -by
