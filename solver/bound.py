"""A lower bound by message passing: sequential tree-reweighted message passing in exact integers.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006. A message moves cost between a
variable and a link without changing any assignment's total, so the sum of the separate minima is a bound whatever the
messages are. Every number is int64: rounding a message down only moves a little less, it never falsifies the bound.

Costs are scaled by 2**shift to make that rounding harmless, and the memory row enters as a price per memory unit:

    min (cost + price * (memory - budget))  <=  min cost subject to memory <= budget       for every price >= 0
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from fxpar.solver.graph import BLOCKED, Graph, IntArray
from fxpar.solver.min_plus import MinPlus, both_directions
from fxpar.solver.problem import LARGEST_TOTAL_COST, largest_finite
from fxpar.solver.side_by_side import side_by_side

#: A price is an integer count of 1 / 2**PRICE_BITS scaled ns per memory unit.
PRICE_BITS = 10

#: Costs are scaled to add up to about this many bits: then rounding is a millionth of them and less.
FINE_BITS = 44

#: No honest total, scaled and priced, reaches this: a bound that does shows that the forbidden pairs leave nothing.
DIVERGED = 2**54


@dataclass(frozen=True, eq=False)
class Messages:
    """`up[link]` [states of v] came from u, `down[link]` [states of u] came from v, for every link u < v."""

    up: tuple[IntArray, ...]
    down: tuple[IntArray, ...]


@dataclass(frozen=True, eq=False)
class Scaled:
    """A graph's costs times 2**shift, ready for message passing."""

    graph: Graph
    shift: int
    costs: tuple[IntArray, ...]
    tables: tuple[IntArray, ...]
    forward: tuple[MinPlus, ...]
    backward: tuple[MinPlus, ...]

    @property
    def largest_price(self) -> int:
        """The highest price for which no sum overflows."""
        memory = sum(int(each.max()) for each in self.graph.memory)
        return (LARGEST_TOTAL_COST << PRICE_BITS) // (4 * max(memory, 1))

    def priced(self, price: int) -> list[IntArray]:
        """Cost plus price times memory of every state, scaled, rounded down."""
        if price == 0:
            return list(self.costs)
        return [
            costs + ((memory * price) >> PRICE_BITS)
            for costs, memory in zip(self.costs, self.graph.memory, strict=True)
        ]

    def true_bound(self, scaled_minimum: int, price: int) -> int:
        """The bound in ns that a scaled minimum at `price` proves."""
        if price:
            assert self.graph.budget is not None
            scaled_minimum -= (price * self.graph.budget) >> PRICE_BITS
        return self.graph.constant - ((-scaled_minimum) >> self.shift)

    def room(self, scaled_minimum: int, price: int, cost: int) -> int:
        """How much the scaled minimum may rise until `true_bound` exceeds `cost` ns."""
        ceiling = (cost - self.graph.constant) << self.shift
        if price:
            assert self.graph.budget is not None
            ceiling += (price * self.graph.budget) >> PRICE_BITS
        return ceiling - scaled_minimum

    def rational(self, price: int) -> Fraction:
        """The price in ns per memory unit."""
        return Fraction(price, 1 << (PRICE_BITS + self.shift))


def scale(graph: Graph, shift: int | None = None) -> Scaled:
    """Prepares `graph`; the shift is as large as the magnitude of the costs allows unless given."""
    entries = sum(table.size for table in graph.tables)
    if shift is None:
        total = sum(largest_finite(costs) for costs in graph.costs)
        spread = side_by_side(_largest, graph.tables, entries)
        total += sum(spread[link.table] for link in graph.links)
        shift = max(0, min(10, FINE_BITS - total.bit_length()))
    tables = tuple(side_by_side(partial(_shifted, shift), graph.tables, entries)) if shift else graph.tables
    pushes = side_by_side(both_directions, tables, entries)
    return Scaled(
        graph=graph,
        shift=shift,
        costs=tuple(costs << shift for costs in graph.costs),
        tables=tables,
        forward=tuple(forward for forward, _ in pushes),
        backward=tuple(backward for _, backward in pushes),
    )


def _largest(table: IntArray) -> int:
    largest = int(table.max())
    return largest if largest < BLOCKED else int(np.where(table < BLOCKED, table, 0).max())


def _shifted(shift: int, table: IntArray) -> IntArray:
    shifted = table << shift
    np.copyto(shifted, table, where=table >= BLOCKED)
    return shifted


def no_messages(graph: Graph) -> Messages:
    """All zero."""
    return Messages(
        up=tuple(np.zeros(len(graph.costs[link.v]), dtype=np.int64) for link in graph.links),
        down=tuple(np.zeros(len(graph.costs[link.u]), dtype=np.int64) for link in graph.links),
    )


class Passing:
    """The state of message passing over one scaled graph: messages that sweeps improve."""

    def __init__(self, scaled: Scaled, messages: Messages) -> None:
        self.scaled = scaled
        self.up = list(messages.up)
        self.down = list(messages.down)
        graph = scaled.graph
        self.earlier: list[list[tuple[int, MinPlus]]] = [[] for _ in range(graph.size)]
        self.later: list[list[tuple[int, MinPlus]]] = [[] for _ in range(graph.size)]
        for position, link in enumerate(graph.links):
            self.later[link.u].append((position, scaled.forward[link.table]))
            self.earlier[link.v].append((position, scaled.backward[link.table]))
        self.shares = [max(len(a), len(b), 1) for a, b in zip(self.earlier, self.later, strict=True)]
        self.diverged = False
        self.work = 1 + sum(scaled.forward[link.table].core.size + scaled.backward[link.table].core.size
                            for link in graph.links)

    @property
    def messages(self) -> Messages:
        """A snapshot: sweeps replace arrays and never write into them."""
        return Messages(tuple(self.up), tuple(self.down))

    def total(self, costs: list[IntArray], v: int) -> IntArray:
        """The cost of v's states with all messages to it."""
        total = costs[v]
        for position, _ in self.earlier[v]:
            total = total + self.up[position]
        for position, _ in self.later[v]:
            total = total + self.down[position]
        return total

    def sweep(self, costs: list[IntArray]) -> int:
        """One pass down the order and one back. Returns the scaled minimum that the messages prove for `costs`."""
        for v in range(len(costs)):
            if self.later[v]:
                share = self.total(costs, v) // self.shares[v]
                for position, push in self.later[v]:
                    message = push.push(share - self.down[position])
                    self.up[position] = message - np.minimum.reduce(message)
        bound = 0
        for v in range(len(costs) - 1, -1, -1):
            total = self.total(costs, v)
            if self.earlier[v]:
                share = total // self.shares[v] if self.shares[v] > 1 else total
                for position, push in self.earlier[v]:
                    message = push.push(share - self.up[position])
                    least = np.minimum.reduce(message)
                    self.down[position] = message - least
                    bound += int(least)
                total = total - share * len(self.earlier[v])
            bound += int(np.minimum.reduce(total))
        self.diverged = bound >= DIVERGED
        return bound


def proven_minimum(scaled: Scaled, messages: Messages, costs: list[IntArray]) -> int:
    """Recounts from nothing but the messages what they prove: the sum of the separate minima.

    Each variable hands an equal share of its cost to every link to an earlier variable; what is left stays with it.
    """
    passing = Passing(scaled, messages)
    minimum = 0
    for v in range(len(costs)):
        total = passing.total(costs, v)
        share = total // passing.shares[v]
        minimum += int((total - share * len(passing.earlier[v])).min())
        for position, push in passing.earlier[v]:
            minimum += int((push.push(share - messages.up[position]) - messages.down[position]).min())
    return minimum


def forced_minima(scaled: Scaled, messages: Messages, costs: list[IntArray]) -> list[IntArray]:
    """For every state, what the messages prove (scaled) once that state is forced.

    One sweep up and one down, in which every variable keeps its whole cost when its turn comes: what all others prove
    is added to it. That proof is made of
    - variables above v, which gave a share to every link to an earlier one on the way up, and these links;
    - variables below v, which gave a share to every later link that ends at v or before, and these links; of the rest
      of their cost the least.
    Both the least rest and the least of a link are numbers; all that v's states differ in is v's own cost with the
    messages to it.
    """
    passing = Passing(scaled, messages)
    links = scaled.graph.links
    from_above, from_below, rest = [0] * len(links), [0] * len(links), [0] * len(costs)
    for v in range(len(costs) - 1, -1, -1):
        total = passing.total(costs, v)
        share = total // passing.shares[v]
        for position, push in passing.earlier[v]:
            message = push.push(share - passing.up[position])
            from_above[position] = int(message.min())
            passing.down[position] = message - from_above[position]
        rest[v] = int((total - share * len(passing.earlier[v])).min())
    proven = sum(from_above) + sum(rest)
    least = [0] * len(costs)
    minima = []
    for v in range(len(costs)):
        proven -= rest[v]
        for position, _ in passing.earlier[v]:
            proven += from_below[position] - from_above[position] - least[links[position].u]
        total = passing.total(costs, v)
        minima.append(total + proven)
        # a share is rounded down, so a state's rest is at least the least share as often as it was kept
        least[v] = int(total.min()) // passing.shares[v]
        proven += least[v] * passing.shares[v]
        share = total // passing.shares[v]
        for position, push in passing.later[v]:
            message = push.push(share - passing.down[position])
            from_below[position] = int(message.min())
            passing.up[position] = message - from_below[position]
    return minima
