"""Going on from an earlier search: never worse proofs, and messages that survive another choice of states."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fxpar.solver.arcs import Arcs, all_states, arc_consistent
from fxpar.solver.bound import Passing, no_messages, scale
from fxpar.solver.brute_force import brute_force
from fxpar.solver.graph import merge, restrict
from fxpar.solver.solution import Status
from fxpar.solver.solve import solve
from fxpar.solver.warm import resumed, start_from
from tests.solver.draw import problems


@given(problems(), st.integers(0, 40))
def test_another_budget_from_where_the_first_ended(problem, budget):
    first = solve(problem, gap=0.05)
    other = replace(problem, budget=budget)
    candidates = [] if first.assignment is None else [first.assignment]
    found = solve(other, gap=0.0, candidates=candidates, start=first.start)
    best = brute_force(other)
    if best.assignment is None:
        assert found.status in (Status.INFEASIBLE, Status.UNKNOWN) and found.assignment is None
    else:
        assert found.bound <= best.cost <= found.cost
        assert found.status is not Status.OPTIMAL or found.cost == best.cost


@given(problems())
def test_messages_prove_the_same_on_the_graph_they_come_from(problem):
    whole = merge(problem)
    live = arc_consistent(Arcs(whole), all_states(whole))
    if live is None:
        return
    graph = restrict(whole, live)
    scaled = scale(graph)
    passing = Passing(scaled, no_messages(graph))
    costs = scaled.priced(0)
    for _ in range(5):
        bound = passing.sweep(costs)
    again = Passing(scaled, no_messages(graph))
    resumed(scaled, again, start_from(scaled, passing.messages, 0), costs)
    # rounding alone moves them apart
    assert again.sweep(costs) >= bound - len(graph.links) * 8
