"""Solving a Problem: shrink it, bound it, decode assignments, and settle what is left exactly.

Nothing here reads a clock or a hash order: the same problem gives the same solution in every process.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from fxpar.solver.arcs import Arcs, all_states, arc_consistent, undominated
from fxpar.solver.bound import Scaled, forced_minima, scale
from fxpar.solver.decode import Neighbourhood
from fxpar.solver.dual import PRICES, WIDE, Bracket, Dual, Known
from fxpar.solver.graph import BLOCKED, BoolArray, Graph, IntArray, merge, restrict, with_memory
from fxpar.solver.order import narrow_order, reordered
from fxpar.solver.problem import FORBIDDEN, LARGEST_TOTAL_MEMORY, Edge, Problem, Variable
from fxpar.solver.residue import residue_size, solve_residue
from fxpar.solver.solution import Solution, Status
from fxpar.solver.warm import Prepared, Start, start_from

#: Booleans that CP-SAT is given at most: to settle everything, and to search among pooled states.
SETTLE_SIZE = 6_000
POOL_SIZE = 4_000
#: The next best states of every variable that are put into a pool, as many as stay small.
MOST_PER_VARIABLE = (1, 2, 3, 4, 6, 8, 12, 16, 32)
#: Deterministic CP-SAT time per unit of effort; one is about a second.
TIME_PER_EFFORT = 0.3
ROUNDS = 6
#: With less effort sweeps end when they no longer promise much.
PERSISTENT = 10
#: Table entries of graphs whose bound is worth all the sweeps that still gain something.
SWEPT = 5_000_000
#: Graphs of more states are not searched for states that others replace: it takes longer than it spares.
MANY_STATES = 10_000
#: Prices tried on a wide graph before something good is looked for that spares states.
WIDE_PRICES = 3
#: Only graphs of fewer states may be small enough to settle.
FEW_STATES = 6_000

Progress = Callable[[str], None]


def solve(
    problem: Problem,
    *,
    gap: float = 0.01,
    candidates: Sequence[Sequence[int]] = (),
    effort: int = 10,
    start: Start | None = None,
    progress: Progress | None = None,
) -> Solution:
    """The cheapest assignment found and a proven lower bound.

    gap: stop once (cost - bound) / cost is at most this; 0 asks for the optimum. candidates: assignments to start from;
    the result never costs more than any feasible one of them; of one that needs too much memory, what is left when it
    gives up time for memory. effort: how long to go on when the gap stays open. start: of an earlier solution.
    progress: called with a line of text after each step.
    Raises ValueError on a malformed problem, or on a candidate of the wrong length or with an unknown state.
    """
    problem.validate()
    prepared = start.prepared if start is not None and start.prepared and start.prepared.serves(problem) else None
    order = narrow_order(problem) if prepared is None else list(prepared.order)
    for candidate in candidates:
        problem.cost(candidate)
    place = sorted(range(len(order)), key=order.__getitem__)
    run = _Run(
        reordered(problem, order), gap, effort, progress or _silent, None if start is None else start.renamed(place)
    )
    run.prepared = prepared
    solution = run.solve([[candidate[v] for v in order] for candidate in candidates])
    if solution.start is not None:
        made = None if run.prepared is None else replace(run.prepared, problem=problem, order=tuple(order))
        solution = replace(solution, start=replace(solution.start.renamed(order), prepared=made))
    if solution.assignment is None:
        return solution
    assignment = [0] * len(order)
    for v, state in zip(order, solution.assignment, strict=True):
        assignment[v] = state
    if problem.cost(assignment) != solution.cost or not problem.feasible(assignment):
        raise RuntimeError(f"internal error: the assignment found does not cost {solution.cost} ns")
    return replace(solution, assignment=tuple(assignment))


def _silent(line: str) -> None:
    """The progress callback that says nothing."""


class _Run:
    """One call of `solve`: the best assignment and bound so far, in terms of the Problem."""

    def __init__(
        self, problem: Problem, gap: float, effort: int, progress: Progress, start: Start | None = None
    ) -> None:
        self.problem = problem
        self.gap = gap
        self.effort = effort
        self.progress = progress
        self.best: tuple[int, ...] | None = None
        self.best_cost: int | None = None
        self.bound: int | None = None
        self.multiplier = Fraction(0)
        self.min_memory: int | None = None
        self.start = start
        self.bracket = Bracket()
        self.prepared: Prepared | None = None

    def solve(self, candidates: Sequence[Sequence[int]]) -> Solution:
        for candidate in candidates:
            self.offer(candidate)
        ready, self.prepared = self.prepared, None
        whole = merge(self.problem) if ready is None else with_memory(ready.whole, self.problem)
        live = arc_consistent(Arcs(whole), all_states(whole)) if ready is None else ready.live
        if live is None:
            return self.infeasible()
        budget = whole.budget
        if budget is not None:
            least = sum(int(memory[mask].min()) for memory, mask in zip(whole.memory, live, strict=True))
            most = sum(int(memory[mask].max()) for memory, mask in zip(whole.memory, live, strict=True))
            if least > budget:
                self.find_small_memory()
                return self.infeasible()
            if most <= budget:
                whole = replace(whole, budget=None)
        if ready is None:
            graph = self.shrink(whole, live)
            if graph is None:
                return self.infeasible()
            scaled = scale(graph)
        else:
            graph = replace(with_memory(ready.graph, self.problem), budget=whole.budget)
            scaled = replace(ready.scaled, graph=graph)
        if sum(int(mask.sum()) for mask in live) > MANY_STATES:  # no state was spared for its memory
            self.prepared = Prepared(self.problem, (), whole, tuple(live), graph, scaled)
        if whole.budget is not None:
            for candidate in candidates:
                self.fit(whole, candidate)
        self.progress(f"{_count(whole)} states, {_count(graph)} kept")
        if not self.by_rounds(graph, scaled):
            return self.infeasible()
        return self.finish(whole)

    def offer(self, assignment: Sequence[int]) -> None:
        """Keeps an assignment if it is feasible and the best so far; ties go to the lexicographically smaller."""
        assignment = tuple(int(state) for state in assignment)
        cost = self.problem.cost(assignment)
        if cost is None:
            return
        memory = self.problem.memory(assignment)
        if self.problem.budget is not None and memory > self.problem.budget:
            self.min_memory = memory if self.min_memory is None else min(memory, self.min_memory)
            return
        if self.best_cost is None or self.best is None or (cost, assignment) < (self.best_cost, self.best):
            self.best, self.best_cost = assignment, cost

    def fit(self, graph: Graph, candidate: Sequence[int]) -> None:
        """Offers what is left of a candidate that holds forbidden pairs when it avoids them, or that needs too much
        memory when it gives up time for memory."""
        assert graph.budget is not None
        near = Neighbourhood(graph, graph.tables, list(graph.costs), list(candidate))
        if graph.cost(candidate) >= BLOCKED:
            near.descend(None)
            if graph.cost(near.choice) >= BLOCKED:
                return
            self.offer(near.choice)
        if near.memory <= graph.budget:
            return
        if self.bracket.low is None or graph.cost(near.choice) < self.bracket.low.cost:
            self.bracket = Bracket(Known(Fraction(0), graph.cost(near.choice), near.memory))
        if near.fit(graph.budget):
            near.descend(graph.budget)
            self.offer(near.choice)

    def raise_bound(self, bound: int, multiplier: Fraction, pruned: bool) -> None:
        """Takes over a bound; once states are `pruned` by cost it holds for what is better than the best so far."""
        if self.best_cost is not None and bound > self.best_cost:
            if not pruned:
                raise RuntimeError(f"internal error: bound {bound} ns above a feasible cost {self.best_cost} ns")
            bound = self.best_cost
        if self.bound is None or bound > self.bound:
            self.bound, self.multiplier = bound, multiplier

    def close_enough(self) -> bool:
        if self.best_cost is None or self.bound is None:
            return False
        return self.best_cost - self.bound <= self.gap * abs(self.best_cost)

    def far(self) -> bool:
        """True when what is open is well above the gap asked for."""
        if self.best_cost is None or self.bound is None:
            return True
        return self.best_cost - self.bound > 1.25 * self.gap * abs(self.best_cost)

    def shrink(self, graph: Graph, live: Sequence[BoolArray]) -> Graph | None:
        """`graph` with the `live` states that matter; None if nothing without forbidden pairs is among them."""
        arcs = Arcs(graph)
        consistent = arc_consistent(arcs, live)
        if consistent is None:
            return None
        if sum(int(mask.sum()) for mask in consistent) <= MANY_STATES:
            consistent = arc_consistent(arcs, undominated(graph, consistent, graph.budget is not None))
        return None if consistent is None else restrict(graph, consistent)

    def by_rounds(self, graph: Graph, scaled: Scaled) -> bool:
        """Bounds, decodes, prunes and settles until close enough or out of ideas. False: proven to be infeasible."""
        current: Graph = graph
        for number in range(ROUNDS):
            before = (self.best_cost, self.bound)
            pruned = number > 0
            dual = self.bounded(scale(current) if pruned else scaled, pruned)
            if dual.impossible:
                return self.best is not None and self.nothing_better()
            if self.best is None and not self.find_any(dual):
                return False
            smaller = self.narrowed(dual)
            few = smaller is not None and 2 * _count(smaller) <= _count(current)
            if smaller is not None and not few and dual.ended and self.effort >= PERSISTENT:
                # too few states can be spared: better is looked for at other prices, and then, where sweeps are cheap
                # or much is open, with all the bound that they can give
                dual.stir(self.gap / 2, self.best_cost)
                self.take(dual, pruned)
                smaller = self.narrowed(dual)
                if smaller is not None and (dual.passing.work <= SWEPT or self.far()):
                    dual.persist(self.gap / 2, self.best_cost)
                    self.take(dual, pruned)
                    smaller = self.narrowed(dual)
            if smaller is None:
                return True
            spared = 10 * _count(smaller) <= 9 * _count(current)
            if dual.ended and (not spared or (number > 0 and not self.gained(before)) or self.effort < PERSISTENT):
                return True
            if number > 1 and dual.passing.work > SWEPT and not self.far():
                return True
            current = smaller
        return True

    def narrowed(self, dual: Dual) -> Graph | None:
        """Looks for better among the states that `dual` points to; what of its graph could still hold something better.
        None: nothing is left to do."""
        if self.best is None or self.best_cost == self.bound:
            return None
        minima = forced_minima(dual.scaled, dual.messages, dual.scaled.priced(dual.price))
        for last in (False, True):
            if last or self.promised(dual, minima) <= FEW_STATES:
                smaller = self.promising(dual, minima)
                if smaller is None:
                    self.nothing_better()
                    return None
                if residue_size(smaller) <= SETTLE_SIZE:
                    self.settle(smaller, whole=True)
                    return None
                if last:
                    return smaller
            self.settle(self.pooled(dual, minima), whole=False)
            if self.close_enough():
                return None
        return None

    def bounded(self, scaled: Scaled, pruned: bool) -> Dual:
        """Runs the search over prices on a graph and takes over what it finds; on a wide graph at first for a few
        prices only: once something good is found there, states can be spared."""
        dual = Dual(scaled, Arcs(scaled.graph), self.start, near=not pruned or self.bracket.high is not None)
        known = None if self.best is None else scaled.graph.positions(self.best)
        if known is not None:
            dual.offer(known)
        prices = PRICES if pruned or dual.passing.work <= WIDE or self.best is None else WIDE_PRICES
        self.bracket = dual.close(self.gap / 2, self.best_cost, self.bracket, prices)
        self.take(dual, pruned)
        return dual

    def take(self, dual: Dual, pruned: bool) -> None:
        """Takes over the best choice and the bound that `dual` has by now."""
        if dual.best is not None:
            self.offer(dual.graph.original(dual.best))
        bound, price = dual.proven()
        self.raise_bound(bound, dual.scaled.rational(price), pruned)
        self.start = start_from(dual.scaled, dual.messages, dual.price)
        self.progress(f"{'elimination' if dual.narrow else 'message passing'}: {self.standing()}")

    def find_any(self, dual: Dual) -> bool:
        """Looks for an assignment where decoding found none. False: proven that there is none."""
        minima = forced_minima(dual.scaled, dual.messages, dual.scaled.priced(dual.price))
        self.settle(self.pooled(dual, minima), whole=False)
        budget = dual.graph.budget
        if self.best is None and budget is not None and self.find_small_memory() > budget:
            return False
        if self.best is None:
            found = solve_residue(dual.graph, None, self.effort * TIME_PER_EFFORT, costed=False)
            if found.choice is None:
                return not found.settled
            self.offer(dual.graph.original(found.choice))
        return True

    def find_small_memory(self) -> int:
        """Looks for the assignment of least memory, and returns a lower bound on it in memory units."""
        solution = solve(_memory_problem(self.problem), gap=0.0, effort=self.effort)
        if solution.assignment is not None:
            self.offer(solution.assignment)
        self.progress(f"least memory: at least {solution.bound} units")
        return solution.bound if solution.status is not Status.INFEASIBLE else LARGEST_TOTAL_MEMORY

    def promised(self, dual: Dual, minima: Sequence[IntArray]) -> int:
        """How many states could still be part of something better than the best."""
        ceiling = self.ceiling(dual)
        return sum(int((minimum <= ceiling).sum()) for minimum in minima)

    def promising(self, dual: Dual, minima: Sequence[IntArray]) -> Graph | None:
        """The graph of `dual` without states that its bound proves unable to beat the best; None if nothing can."""
        ceiling = self.ceiling(dual)
        return self.shrink(dual.graph, [minimum <= ceiling for minimum in minima])

    def ceiling(self, dual: Dual) -> int:
        """The largest (scaled) minimum that still leaves room for something better than the best."""
        assert self.best_cost is not None
        return dual.scaled.room(0, dual.price, self.best_cost - 1)

    def pooled(self, dual: Dual, minima: Sequence[IntArray]) -> Graph | None:
        """The graph of `dual` with the states of good decoded choices, and as many of the next best as stay small."""
        arcs = Arcs(dual.graph)
        for share in (1, 2, 4, 8, 16):
            chosen = self.consistent(dual.graph, arcs, dual.pooled_states(share))
            if chosen is not None and residue_size(chosen) <= POOL_SIZE:
                break
        widest = max(int(each.max()) for each in minima) if self.best_cost is None else self.ceiling(dual)
        used = dual.pooled_states(share)
        by_minimum = [np.argsort(minimum, kind="stable") for minimum in minima]
        for most in MOST_PER_VARIABLE:
            masks = []
            for mask, minimum, order in zip(used, minima, by_minimum, strict=True):
                wider = mask.copy()
                wider[order[:most]] |= minimum[order[:most]] <= widest
                masks.append(wider)
            graph = self.consistent(dual.graph, arcs, masks)
            if graph is not None and residue_size(graph) > POOL_SIZE:
                return graph if chosen is None else chosen
            chosen = graph or chosen
        return chosen

    def consistent(self, graph: Graph, arcs: Arcs, masks: list[BoolArray]) -> Graph | None:
        """`graph` with the states of `masks` that can be part of anything; None if nothing can."""
        live = arc_consistent(arcs, masks)
        return None if live is None else restrict(graph, live)

    def settle(self, graph: Graph | None, whole: bool) -> None:
        """Solves `graph` exactly within the effort. `whole`: it holds everything that could beat the best."""
        if graph is None:
            return
        known = None if self.best is None else graph.positions(self.best)
        found = solve_residue(graph, known, self.effort * TIME_PER_EFFORT)
        if found.choice is not None:
            self.offer(graph.original(found.choice))
        if whole and found.settled:
            self.nothing_better()
        elif whole and found.bound is not None:
            self.raise_bound(found.bound, self.multiplier, pruned=True)
        self.progress(f"exact search in {_count(graph)} states: {self.standing()}")

    def nothing_better(self) -> bool:
        """Records that the best is optimal. True."""
        assert self.best_cost is not None
        self.bound = self.best_cost
        return True

    def gained(self, before: tuple[int | None, int | None]) -> bool:
        """True when best and bound have come closer than before by a fair part of the gap allowed."""
        cost, bound = before
        if cost is None or bound is None or self.best_cost is None or self.bound is None:
            return True
        return 10 * ((cost - self.best_cost) + (self.bound - bound)) > self.gap * abs(self.best_cost)

    def standing(self) -> str:
        """Best and bound in words."""
        if self.best_cost is None:
            return f"nothing that fits yet, at least {self.bound} ns"
        return f"{self.best_cost} ns, at least {self.bound} ns"

    def infeasible(self) -> Solution:
        """The answer that no assignment exists."""
        if self.best is not None:
            raise RuntimeError("internal error: proved that nothing is feasible, holding a feasible assignment")
        return Solution(Status.INFEASIBLE, None, None, 0, None, None, Fraction(0), self.min_memory)

    def finish(self, whole: Graph) -> Solution:
        """Moves ties to smaller states, then recounts everything from the Problem."""
        bound = self.bound if self.bound is not None else 0
        if self.best is None:
            return Solution(Status.UNKNOWN, None, None, bound, None, None, self.multiplier, self.min_memory, self.start)
        polish = Neighbourhood(whole, whole.tables, list(whole.costs), list(self.best))
        polish.descend(whole.budget)
        self.offer(polish.choice)
        cost, memory = self.problem.cost(self.best), self.problem.memory(self.best)
        if cost is None or cost < bound or not self.problem.feasible(self.best):
            raise RuntimeError(f"internal error: cost {cost} ns, bound {bound} ns, memory {memory} units")
        status = Status.OPTIMAL if cost == bound else Status.FEASIBLE
        gap = (cost - bound) / max(abs(cost), 1)
        return Solution(status, self.best, cost, bound, memory, gap, self.multiplier, None, self.start)


def _count(graph: Graph) -> int:
    """Number of states."""
    return sum(len(costs) for costs in graph.costs)


def _memory_problem(problem: Problem) -> Problem:
    """Memory as the cost, no budget, and of the pairs only which are forbidden."""
    barred = [bool((table >= FORBIDDEN).any()) for table in problem.tables]
    return Problem(
        variables=tuple(
            Variable(each.name, np.where(each.costs >= FORBIDDEN, FORBIDDEN, each.memory), np.zeros_like(each.memory))
            for each in problem.variables
        ),
        edges=tuple(Edge(edge.u, edge.v, edge.table) for edge in problem.edges if barred[edge.table]),
        tables=tuple(np.where(table >= FORBIDDEN, FORBIDDEN, 0) for table in problem.tables),
        budget=None,
    )
