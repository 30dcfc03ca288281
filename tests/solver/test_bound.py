import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxpar.solver.arcs import Arcs, all_states, arc_consistent, undominated
from fxpar.solver.bound import Messages, Passing, forced_minima, no_messages, proven_minimum, scale
from fxpar.solver.brute_force import brute_force
from fxpar.solver.eliminate import eliminate
from fxpar.solver.graph import BLOCKED, merge, restrict
from fxpar.solver.min_plus import MinPlus
from fxpar.solver.solution import Status
from tests.solver.draw import problems
from tests.solver.layered import layered


def consistent_graph(problem):
    whole = merge(problem)
    live = arc_consistent(Arcs(whole), all_states(whole))
    return None if live is None else restrict(whole, live)


@given(problems(), st.integers(0, 2**32 - 1), st.integers(0, 10**6), st.integers(0, 4))
def test_any_messages_at_any_price_prove_no_more_than_the_optimum(problem, seed, price, sweeps):
    graph, exact = consistent_graph(problem), brute_force(problem)
    if graph is None or exact.cost is None:
        return
    rng = np.random.default_rng(seed)
    scaled = scale(graph)
    price = 0 if problem.budget is None else min(price, scaled.largest_price)
    zero = no_messages(graph)
    noise = Messages(
        tuple(rng.integers(-(10**9), 10**9, len(each)) for each in zero.up),
        tuple(rng.integers(-(10**9), 10**9, len(each)) for each in zero.down),
    )
    costs = scaled.priced(price)
    for messages in (zero, noise):
        passing = Passing(scaled, messages)
        assert scaled.true_bound(proven_minimum(scaled, messages, costs), price) <= exact.cost
        for _ in range(sweeps):
            told = passing.sweep(costs)
            assert told == proven_minimum(scaled, passing.messages, costs)
            assert scaled.true_bound(told, price) <= exact.cost


@given(problems(), st.integers(0, 10**5), st.integers(0, 3), st.booleans())
def test_a_forced_state_proves_no_more_than_the_best_with_it(problem, price, sweeps, arbitrary):
    graph = consistent_graph(problem)
    if graph is None:
        return
    scaled = scale(graph)
    price = 0 if problem.budget is None else min(price, scaled.largest_price)
    costs = scaled.priced(price)
    passing = Passing(scaled, no_messages(graph))
    for _ in range(sweeps):
        passing.sweep(costs)
    messages = passing.messages
    if arbitrary:  # any numbers are messages
        rng = np.random.default_rng(price + sweeps)
        messages = Messages(*(tuple(m + rng.integers(-50, 50, m.shape) for m in side)
                              for side in (messages.up, messages.down)))
    minima = forced_minima(scaled, messages, costs)
    for choice in itertools.product(*(range(len(each)) for each in graph.costs)):
        total = sum(int(own[i]) for own, i in zip(costs, choice, strict=True))
        total += sum(int(scaled.tables[link.table][choice[link.u], choice[link.v]]) for link in graph.links)
        for v, state in enumerate(choice):
            assert minima[v][state] <= total


@given(problems(), st.integers(0, 3))
def test_some_forced_state_proves_what_sweeps_did(problem, sweeps):
    graph = consistent_graph(problem)
    if graph is None:
        return
    scaled = scale(graph)
    passing = Passing(scaled, no_messages(graph))
    told = 0
    for _ in range(1 + sweeps):
        told = passing.sweep(list(scaled.costs))
    rounding = 64 * (len(graph.links) + graph.size)
    for minimum in forced_minima(scaled, passing.messages, list(scaled.costs)):
        assert minimum.min() >= told - rounding


@given(problems(budgets=False))
def test_elimination_is_exact(problem):
    exact = brute_force(problem)
    minimum, choice = eliminate(merge(problem))
    if exact.status is Status.INFEASIBLE:
        assert minimum >= BLOCKED
    else:
        assert minimum == exact.cost == problem.cost(choice)


@given(problems())
def test_restricting_to_undominated_states_keeps_the_optimum(problem):
    whole, exact = merge(problem), brute_force(problem)
    live = arc_consistent(Arcs(whole), all_states(whole))
    if live is None:
        assert exact.status is Status.INFEASIBLE
        return
    kept = undominated(whole, live, binding=True)
    graph = restrict(whole, kept)
    smaller = brute_force_over(problem, kept)
    assert smaller == exact.cost
    if exact.cost is not None and (choice := graph.positions(exact.assignment)) is not None:
        assert graph.cost(choice) == exact.cost and graph.weight(choice) == exact.memory


def brute_force_over(problem, kept):
    from itertools import product

    choices = product(*(np.flatnonzero(mask).tolist() for mask in kept))
    return min((problem.cost(each) for each in choices if problem.feasible(each)), default=None)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32 - 1), st.booleans())
def test_pushing_equals_its_definition(rows, columns, seed, repeated):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 100, (rows, columns))
    if repeated:
        table = table[rng.integers(0, max(rows // 5, 1), rows)][:, rng.integers(0, max(columns // 5, 1), columns)]
    a = rng.integers(0, 100, rows)
    assert (MinPlus(table).push(a) == (a[:, None] + table).min(axis=0)).all()


def test_sweeps_raise_the_bound_of_a_layered_graph_up_to_the_optimum_of_a_chain():
    graph = consistent_graph(layered(3, axes=1))
    scaled = scale(graph)
    passing = Passing(scaled, no_messages(graph))
    costs = scaled.priced(0)
    bounds = [scaled.true_bound(passing.sweep(costs), 0) for _ in range(20)]
    assert all(b >= a - graph.size for a, b in zip(bounds, bounds[1:], strict=False))
    minimum, _ = eliminate(graph)
    assert 0.95 * minimum <= bounds[-1] <= minimum
