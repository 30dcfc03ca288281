"""The search over the price of memory: sweeps of message passing give bounds, decoding gives assignments.

At a price of 0 the cheapest assignment may not fit the budget; at a high price it fits with room to spare. The bound is
concave in the price, so a bracket closes in on the best price. Everything found on the way goes into a pool.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from fxpar.solver.arcs import Arcs, all_states, arc_consistent, undominated
from fxpar.solver.bound import PRICE_BITS, Messages, Passing, Scaled, no_messages, proven_minimum
from fxpar.solver.decode import Neighbourhood, decode
from fxpar.solver.eliminate import eliminate
from fxpar.solver.graph import BLOCKED, BoolArray, IntArray, restrict
from fxpar.solver.warm import Start, resumed

#: Sweeps at one price, and how many without progress end them.
SWEEPS_PER_PRICE = 12
SWEEPS_AT_FIRST = 25
SWEEPS_FROM_START = 8
SWEEPS_AT_LAST = 150
#: At the last price small graphs are swept up to MOST_SWEEPS times, which touch PATIENCE table entries at most, as long
#: as the pace of the last PACE sweeps promises something: some converge slowly, but all the way.
MOST_SWEEPS = 2000
PACE = 20
PATIENCE = 600_000_000
STALLED_AFTER = 4
#: A sweep that closes less than 1 / this of what is open between bound and best makes no progress.
PROGRESS = 150
#: Without any assignment yet: 1 / this of the bound.
PROGRESS_ALONE = 20_000
PRICES = 14
#: No further price is tried where it could raise the bound by no more than 1 / this of the gap asked for.
PROMISE = 8
#: Prices that decoding is stirred at. Where memory does not bind: it is worth 1 / this of the cost. Where it does: this
#: many 16ths of the best price. And sweeps at each.
STIRRED_SHARES = (3, 30, 10, 2, 20, 4, 100, 8, 1000)
STIRRED_TIMES = (12, 24, 8, 32, 4, 64, 2, 128)
STIRRED_SWEEPS = 4
#: From a price near the best the first steps are small: by so many eighths.
NEAR_STEPS = (9, 10, 12)
#: Elimination is not tried on graphs with more table entries: looking for states to spare would take longer than it.
WIDE = 20_000_000
#: Decoding costs more than a sweep: only the first few sweeps and then every so many are decoded.
DECODED_AT_FIRST = 5
DECODED_EVERY = 5


@dataclass(frozen=True, eq=False)
class Point:
    """What a run of sweeps at one price ended with: the choice of least priced cost, its cost and memory."""

    price: int
    cost: int
    memory: int


@dataclass(frozen=True)
class Known:
    """A choice, its cost in ns and memory in units, and a price in ns per unit at which it is about the cheapest."""

    price: Fraction
    cost: int
    memory: int


@dataclass(frozen=True)
class Bracket:
    """The best price lies between that of `low`, which needs more memory than there is, and that of `high`, which
    fits."""

    low: Known | None = None
    high: Known | None = None


NO_BRACKET = Bracket()


class Dual:
    """Bounds and choices for one graph.

    near      whether the price of `start` is taken to be near the best.
    narrow    whether elimination solves the priced graph exactly; `exact_bound` (ns) at `exact_price` is its best.
    impossible proven that every choice is forbidden.
    ended     whether `close` tried all prices that promise something.
    bound     ns, the best proven so far (None: no sweep yet); `messages` and `price` prove it.
    best      the cheapest choice found that fits the budget, with `best_cost` in ns, or None.
    pool      the choices found, without repetition.
    """

    def __init__(self, scaled: Scaled, arcs: Arcs, start: Start | None = None, near: bool = True) -> None:
        self.start = start
        self.graph = scaled.graph
        self.arcs = arcs
        self.scaled = scaled
        self.passing = Passing(scaled, no_messages(scaled.graph))
        self.bound: int | None = None
        self.messages: Messages = self.passing.messages
        self.price = 0
        self.best: list[int] | None = None
        self.best_cost: int | None = None
        self.pool: dict[tuple[int, ...], int] = {}
        self.impossible = False
        self.exact_bound: int | None = None
        self.exact_price = 0
        self.narrow = True
        self._gap = 0.0
        self._at_most: int | None = None
        self._free: Point | None = None  # what price 0 gives, where that fits
        self._best_price = False  # the bracket is closed
        self._steps = 0 if start is not None and near else len(NEAR_STEPS)  # taken from the price of the start
        self.ended = True  # not for want of prices alone

    def offer(self, choice: list[int]) -> None:
        """Puts a choice into the pool and keeps it if it is the best that fits."""
        cost = self.graph.cost(choice)
        if cost >= BLOCKED:
            return
        self.pool.setdefault(tuple(choice), cost)
        fits = self.graph.budget is None or self.graph.weight(choice) <= self.graph.budget
        if fits and (self.best_cost is None or (cost, choice) < (self.best_cost, self.best)):
            self.best, self.best_cost = list(choice), cost

    def close(self, gap: float, at_most: int | None, bracket: Bracket = NO_BRACKET, prices: int = PRICES) -> Bracket:
        """Improves bound and choices until they are within `gap`, or no other price promises much.

        at_most: ns, the cost of an assignment known from elsewhere: reaching it within `gap` is enough as well.
        bracket: what is known of prices from elsewhere. prices: tried at most.
        Returns what is known of prices by now.
        """
        self._gap = gap
        self._at_most = at_most
        budget = self.graph.budget
        low, high = self._own(bracket.low), self._own(bracket.high)
        if low is not None and (self.start is not None or (at_most is not None and low.cost >= at_most)):
            # a start's price is near the best, what is known of price 0 is far off
            low = low if low.price else None
        price, point = self._first(low)
        for number in range(prices):
            if point is None or self._done():
                break
            if budget is None or point.memory <= budget:
                high = point
            else:
                low = point
            if high is not None and high.price == 0:
                self._free = high
                break
            if high is None and low is not None and low.price >= self.scaled.largest_price:
                break
            next_price = self._between(low, high)
            if next_price is None:
                self._best_price = True
                break
            if number + 1 == prices:
                self._best_price = self.ended = prices == PRICES
                break
            price = min(next_price, self.scaled.largest_price)
            point = self._at(price, SWEEPS_PER_PRICE)
        return Bracket(self._known(low), self._known(high))

    def _own(self, known: Known | None) -> Point | None:
        """Something known of a price, in this graph's units."""
        if known is None:
            return None
        price = int(known.price * (1 << (self.scaled.shift + PRICE_BITS)))
        return Point(min(price, self.scaled.largest_price), known.cost, known.memory)

    def _known(self, point: Point | None) -> Known | None:
        return None if point is None else Known(self.scaled.rational(point.price), point.cost, point.memory)

    def stir(self, gap: float, at_most: int | None) -> None:
        """Decodes where the messages of other prices than the best lead: at one price alone, decoding may stay far
        from the bound. Nothing here proves a bound."""
        self._gap = gap
        self._at_most = at_most
        if self._free is not None:
            one = 1 << (self.scaled.shift + PRICE_BITS)
            self._decode_at([self._free.cost * one // (share * max(self._free.memory, 1)) for share in STIRRED_SHARES])
        elif self._best_price:
            price = self.exact_price if self.narrow else self.price
            self._decode_at([price * times // 16 for times in STIRRED_TIMES])

    def persist(self, gap: float, at_most: int | None) -> None:
        """Sweeps on at the best price for as long as that promises something."""
        self._gap = gap
        self._at_most = at_most
        if self._free is not None:
            self._run(0, 1 if self.graph.budget is None and self.narrow else None)
        elif self._best_price:
            if self.narrow:
                self.price = self.exact_price
            else:
                self.passing = Passing(self.scaled, self.messages)
            self._run(self.price, None)

    def _first(self, low: Point | None) -> tuple[int, Point | None]:
        """The price to begin at and what it gives: that of the start, going on from its messages; that between `low`
        and the best that fits; or 0."""
        price = 0
        if self.graph.budget is not None:
            if self.start is not None:
                price = min(int(self.start.price * (1 << (self.scaled.shift + PRICE_BITS))), self.scaled.largest_price)
            elif low is not None and (self.best is not None or self._at_most is not None):
                # what is freed last costs more than what is freed on average
                price = min(self._first_price(low) * 3 // 2, self.scaled.largest_price)
        point = self._exactly(price)
        if self.narrow:
            return price, point
        if self.start is not None:
            resumed(self.scaled, self.passing, self.start, self.scaled.priced(price))
        return price, self._run(price, SWEEPS_AT_FIRST if self.start is None else SWEEPS_FROM_START)

    def _decode_at(self, prices: list[int]) -> None:
        if self.narrow:
            return
        kept = self.messages
        self.passing = Passing(self.scaled, kept)
        for price in prices:
            if self._done():
                break
            price = max(0, min(price, self.scaled.largest_price))
            costs = self.scaled.priced(price)
            for _ in range(STIRRED_SWEEPS):
                self.passing.sweep(costs)
                choice = decode(self.passing, costs, self.arcs)
                if choice is not None:
                    self._explore(choice, costs, 0, None)
                if self._done():
                    break
        self.messages = kept
        self.passing = Passing(self.scaled, kept)

    def proven(self) -> tuple[int, int]:
        """The bound in ns and its price: by elimination, or recounted from `messages` alone, whichever is higher."""
        minimum = proven_minimum(self.scaled, self.messages, self.scaled.priced(self.price))
        by_messages = self.scaled.true_bound(minimum, self.price)
        if self.exact_bound is None or self.exact_bound < by_messages:
            return by_messages, self.price
        return self.exact_bound, self.exact_price

    def pooled_states(self, share: int) -> list[BoolArray]:
        """Per variable the states that the best 1 / `share` of the pool use, best by cost priced at the final price."""
        per_unit = self.scaled.rational(self.proven()[1])
        worth = {choice: cost + per_unit * self.graph.weight(choice) for choice, cost in self.pool.items()}
        chosen = sorted(self.pool, key=lambda choice: (worth[choice], choice))[: -(-len(worth) // share)]
        if self.best is not None:
            chosen.append(tuple(self.best))
        masks = [np.zeros(len(costs), dtype=bool) for costs in self.graph.costs]
        for choice in chosen:
            for mask, state in zip(masks, choice, strict=True):
                mask[state] = True
        return masks

    def _done(self) -> bool:
        costs = [cost for cost in (self.best_cost, self._at_most) if cost is not None]
        bounds = [bound for bound in (self.bound, self.exact_bound) if bound is not None]
        if not bounds or not costs:
            return False
        return min(costs) - max(bounds) <= self._gap * abs(min(costs))

    def _at(self, price: int, sweeps: int | None) -> Point | None:
        """What one price gives: exactly if the graph is narrow enough, by message passing if not."""
        point = self._exactly(price) if self.narrow else None
        return point if self.narrow else self._run(price, sweeps)

    def _exactly(self, price: int) -> Point | None:
        """Solves the priced graph by elimination. None if it is too wide (then `narrow` ends) or impossible."""
        if self.passing.work > WIDE:
            self.narrow = False
            return None
        costs = self.scaled.priced(price)
        priced = replace(self.graph, costs=tuple(costs), tables=self.scaled.tables, budget=None, constant=0)
        live = arc_consistent(self.arcs, undominated(priced, all_states(priced), binding=False))
        exact = None if live is None else eliminate(restrict(priced, live))
        if live is None or exact is None:
            self.narrow = False
            return None
        minimum, choice = exact
        if minimum >= BLOCKED:
            self.impossible = True
            return None
        bound = self.scaled.true_bound(minimum, price)
        if self.exact_bound is None or bound > self.exact_bound:
            self.exact_bound, self.exact_price = bound, price
        choice = [int(np.flatnonzero(mask)[state]) for mask, state in zip(live, choice, strict=True)]
        return self._explore(choice, costs, price, None)[1]

    def _run(self, price: int, sweeps: int | None) -> Point | None:
        """Sweeps at one price; where `sweeps` is None, as many as are worth their work. None if no choice without
        forbidden pairs was decoded."""
        patient = sweeps is None
        if sweeps is None:
            sweeps = max(SWEEPS_AT_LAST, min(PATIENCE // self.passing.work, MOST_SWEEPS))
        paces: list[int] = []
        costs = self.scaled.priced(price)
        found: tuple[int, Point] | None = None
        best_here: int | None = None
        stalled = 0
        last_choice: list[int] | None = None
        for number in range(sweeps):
            bound = self.scaled.true_bound(self.passing.sweep(costs), price)
            if self.passing.diverged:
                self.impossible = True
                break
            if self.bound is None or bound > self.bound:
                self.bound, self.price, self.messages = bound, price, self.passing.messages
            if number < DECODED_AT_FIRST or number % DECODED_EVERY == 0:
                choice = decode(self.passing, costs, self.arcs)
                if choice is not None and choice != last_choice:
                    last_choice = choice
                    found = self._explore(choice, costs, price, found)
            if self._done():
                break
            if found is not None and found[0] <= bound:
                break
            known = [cost for cost in (self.best_cost, self._at_most, found and found[0]) if cost is not None]
            open_gap = min(known) - bound if known else abs(bound) * PROGRESS // PROGRESS_ALONE
            if best_here is None or (bound - best_here) * PROGRESS > open_gap:
                best_here, stalled = bound, 0
            else:
                stalled += 1
            if patient:
                # at this pace, would all sweeps that are left close a fair part of what is open?
                paces.append(bound)
                slow = len(paces) > PACE and (paces[-1] - paces[-1 - PACE]) * (sweeps - number) < PACE * open_gap // 10
            else:
                slow = stalled >= STALLED_AFTER
            if slow:
                break
        return None if found is None else found[1]

    def _explore(
        self, choice: list[int], costs: list[IntArray], price: int, found: tuple[int, Point] | None
    ) -> tuple[int, Point]:
        """Offers a decoded choice, what descends from it, and what fits the budget near it."""
        near = Neighbourhood(self.graph, self.scaled.tables, costs, choice)
        near.descend(None)
        self.offer(near.choice)
        cost, memory = self.graph.cost(near.choice), near.memory
        budget = self.graph.budget
        if budget is not None and memory > budget:
            within = Neighbourhood(self.graph, self.scaled.tables, list(self.scaled.costs), near.choice)
            if within.fit(budget):
                within.descend(budget)
                self.offer(within.choice)
        total = cost
        if price:
            assert budget is not None
            total += int(self.scaled.rational(price) * (memory - budget))
        if found is not None and found[0] <= total:
            return found
        return total, Point(price, cost, memory)

    def _first_price(self, low: Point) -> int:
        """What the best choice that fits paid per unit it freed; without one, a thousandth of the cost of all."""
        budget = self.graph.budget
        assert budget is not None
        one = 1 << (self.scaled.shift + PRICE_BITS)
        fitting = [(self.best_cost, self.graph.weight(self.best))] if self.best_cost is not None and self.best else []
        if self._at_most is not None:
            fitting.append((self._at_most, budget))
        if fitting:
            cost, memory = min(fitting)
            return max(1, (cost - low.cost) * one // max(low.memory - memory, 1))
        return max(1, abs(low.cost) * one // (1000 * max(low.memory - budget, 1)))

    def _promise(self, low: Point, high: Point) -> int:
        """By how much (ns) the bound could rise between two prices: no choice is below its own line, and the higher
        of what the lines give at the ends is had already."""
        budget = self.graph.budget
        assert budget is not None
        over, under = low.memory - budget, budget - high.memory
        meeting = low.cost + (high.cost - low.cost) * over // max(over + under, 1)
        at_low = low.cost + int(self.scaled.rational(low.price) * over)
        at_high = high.cost - int(self.scaled.rational(high.price) * under)
        return meeting - max(at_low, at_high)

    def _between(self, low: Point | None, high: Point | None) -> int | None:
        """The next price: where the priced costs of both ends meet, kept off the ends; None when they are close."""
        if high is None:
            assert low is not None
            if self._steps < len(NEAR_STEPS) and low.price:
                self._steps += 1
                return max(low.price + 1, low.price * NEAR_STEPS[self._steps - 1] // 8)
            guess = self._first_price(low)
            return guess if low.price == 0 else max(2 * low.price, min(guess, 4 * low.price))
        if low is None:
            self._steps += 1
            return high.price * 8 // NEAR_STEPS[min(self._steps, len(NEAR_STEPS)) - 1]
        width = high.price - low.price
        if width <= max(1, high.price // 200) or self._promise(low, high) * PROMISE <= self._gap * abs(low.cost):
            return None
        one = 1 << (self.scaled.shift + PRICE_BITS)
        meet = (high.cost - low.cost) * one // max(low.memory - high.memory, 1)
        return max(low.price + max(width // 10, 1), min(meet, high.price - max(width // 10, 1)))
