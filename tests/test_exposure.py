"""What a step waits for: the replay's stalls, shared out to the collectives on the link."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.cost.cluster import parse_cluster
from fxpar.exposure import PARTS, Exposed, exposed, repriced
from fxpar.formulate import formulate
from fxpar.plans.mesh import parse_mesh
from fxpar.prices import Prices
from fxpar.random_plan import random_decisions
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.simulate import replay, replay_time
from fxpar.solver.problem import FORBIDDEN
from fxpar.waits import Watched, waited_for
from tests.runtime.small_programs import two_layers

MESH = parse_mesh("2x2")
PROGRAM = two_layers()


def prices(cluster):
    return Prices(parse_cluster(cluster), MESH)


@given(st.integers(0, 10**6), st.sampled_from(["2x2:h100", "2x2:l40s", "4:cpu"]))
@settings(max_examples=30)
def test_all_that_a_step_waits_for_is_shared_out(seed, cluster):
    priced = prices(cluster)
    decisions = random_decisions(PROGRAM, MESH, seed)
    local = rewrite(PROGRAM, decisions, (0, 0), every_pass=False)
    watched = Watched([], [])
    timeline = replay_time(local, priced, watched)
    found = waited_for(local, watched)
    assert all(0 <= wait <= taken for wait, taken in found.values())
    # what has no origin in the program (the inner steps of expansions) and what sharing rounds down is not in it
    assert sum(wait for wait, _ in found.values()) <= timeline.exposed_ns
    assert sum(taken for _, taken in found.values()) <= timeline.communication_ns


def test_what_is_hidden_costs_less_and_what_is_not_costs_the_same():
    priced = prices("2x2:l40s")
    formulation = formulate(PROGRAM, MESH, priced, budget_bytes=None, optimizer_bytes=lambda d, n: 8)
    problem = formulation.problem
    key = next((use.owner, use.output) for use in formulation.uses if use is not None and use.kind == "reshard")
    again = repriced(formulation, Exposed({key: PARTS // 4}, {"gradient": PARTS // 2}))
    for edge, other, use in zip(problem.edges, again.edges, formulation.uses, strict=True):
        before, after = problem.tables[edge.table], again.tables[other.table]
        assert ((before >= FORBIDDEN) == (after >= FORBIDDEN)).all()
        open_ = before < FORBIDDEN
        parts = PARTS
        if use is not None:
            parts = {"gradient": PARTS // 2}.get(use.kind, PARTS)
            parts = PARTS // 4 if (use.owner, use.output) == key else parts
        assert (after[open_] == before[open_] * parts // PARTS).all()


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_prices_move_half_way(rounds):
    shown = None
    for _ in range(rounds):
        shown = Exposed({(0, 0): 0}, {"input": 0}).damped(shown)
    expected = PARTS
    for _ in range(rounds):
        expected = (expected + 1) // 2
    assert shown.parts[0, 0] == shown.of_kind["input"] == expected


@given(st.integers(0, 10**6))
@settings(max_examples=10)
def test_what_a_plan_shows_is_a_fraction_of_every_value_it_moves(seed):
    priced = prices("2x2:l40s")
    formulation = formulate(PROGRAM, MESH, priced, budget_bytes=None, optimizer_bytes=lambda d, n: 8)
    replayed = replay(PROGRAM, random_decisions(PROGRAM, MESH, seed), priced, lambda d, n: 8)
    shown = exposed(formulation, replayed.waited)
    assert all(0 <= parts <= PARTS for parts in (*shown.parts.values(), *shown.of_kind.values()))
