"""Finding a proof: sweeps of message passing on the whole problem at a given price of memory.

The bound that solving ends with holds for a graph from which states were pruned, or comes from an exact search; neither
can be handed on. Here messages are passed once more, on the graph that a checker makes for itself.
"""

from fractions import Fraction

from fxpar.solver.bound import PRICE_BITS, Messages, Passing, Scaled, no_messages, scale
from fxpar.solver.certificate import Proof, bound_of, checkable_graph, payments_of
from fxpar.solver.graph import Graph, IntArray
from fxpar.solver.problem import Problem

#: Sweeps at most, and how many that gain less than 1 / GAIN of the bound end them.
SWEEPS = 200
STALLED_AFTER = 3
GAIN = 50_000
#: Rounding all payments to a quantum may cost this share of the bound at most, all links together.
ROUNDING = 20_000


def prove(
    problem: Problem, multiplier: Fraction, *, at_most: int | None = None, sweeps: int = SWEEPS
) -> tuple[Proof, int] | None:
    """A proof for a validated problem and the bound in ns that it proves, as a checker will count it; None when
    forbidden pairs leave nothing to bound.

    multiplier: ns per memory unit. at_most: ns; a bound that reaches it is good enough. sweeps: effort.
    """
    graph = checkable_graph(problem)
    if graph is None:
        return None
    kinds: dict[int, IntArray] = {}
    proof = prove_graph(graph, multiplier, at_most=at_most, sweeps=sweeps, kinds=kinds)
    return proof, bound_of(graph, proof, kinds)


def prove_graph(
    graph: Graph, multiplier: Fraction, *, at_most: int | None = None, sweeps: int = SWEEPS,
    kinds: dict[int, IntArray] | None = None,
) -> Proof:
    """:func:`prove` on a problem's :func:`~fxpar.solver.certificate.checkable_graph`; ``kinds`` as for
    :func:`~fxpar.solver.certificate.bound_of`."""
    scaled = scale(graph)
    price = 0 if graph.budget is None else int(multiplier * (1 << (PRICE_BITS + scaled.shift)))
    price = min(price, scaled.largest_price)
    costs = scaled.priced(price)
    passing = Passing(scaled, no_messages(graph))
    best, messages = scaled.true_bound(0, price), passing.messages
    stalled = 0
    for _ in range(sweeps):
        bound = scaled.true_bound(passing.sweep(costs), price)
        if passing.diverged:
            break
        gained = bound - best
        if gained > 0:
            best, messages = bound, passing.messages
        if at_most is not None and best >= at_most:
            break
        stalled = 0 if gained * GAIN > abs(best) else stalled + 1
        if stalled >= STALLED_AFTER:
            break
    quantum = max(1, abs(best) // (ROUNDING * max(len(graph.links), 1)))
    return Proof(scaled.rational(price), quantum, payments_of(graph, _paying(scaled, messages, costs), quantum, kinds))


def _paying(scaled: Scaled, messages: Messages, costs: list[IntArray]) -> list[IntArray]:
    """Per link what the states of its later end pay into it, ns: their share of its cost, less what came from there."""
    passing = Passing(scaled, messages)
    paying: list[IntArray] = [costs[0]] * len(scaled.graph.links)
    for v in range(scaled.graph.size):
        share = passing.total(costs, v) // passing.shares[v]
        for position, _ in passing.earlier[v]:
            paying[position] = (share - messages.up[position]) >> scaled.shift
    return paying
