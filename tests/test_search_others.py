"""A plan that the caller holds beside the chosen one is taken when it turns out faster, and never when it is not."""

from dataclasses import replace

import pytest

from fxpar.candidates import Request
from fxpar.formulate import output_layouts
from fxpar.plans.layout import replicated
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Certificate, Decisions
from fxpar.progress import silent
from fxpar.search import Search, run_search
from tests.compiled import adamw, decoder_program, prices

MESH = parse_mesh("2")


@pytest.fixture(scope="module")
def search():
    program = decoder_program(width=256, heads=4, layers=1, batch=64, length=128)
    return Search(Request(program, lambda _: prices("2", "1x2:h100"), 2**40, adamw, 0, 0.01, silent))


@pytest.fixture(scope="module")
def fast(search):
    return search.best(MESH, ("",), lambda: search.manual(MESH))


@pytest.fixture(scope="module")
def slow(search, fast):
    """Everything whole on both ranks: an assignment of the same problem that nobody would choose."""
    program = search.request.program
    stored = (replicated(MESH),) * len(program.inputs)
    whole = Decisions(MESH, ((".",),) * len(program.nodes), stored, output_layouts(program, stored, MESH))
    cost = fast.formulation.problem.cost(fast.formulation.assignment(whole))
    found = search.found("fxpar", whole, Certificate("optimal", cost, fast.certificate.bound_ns, 0.5))
    assert found.prediction.step_ns > fast.prediction.step_ns
    return replace(found, formulation=fast.formulation, multiplier=fast.multiplier)


def test_a_faster_plan_takes_the_place_of_the_chosen_one(search, fast, slow, monkeypatch):
    monkeypatch.setattr(Search, "manual", lambda self, mesh: [])
    monkeypatch.setattr(Search, "best", lambda self, mesh, roles, starts: slow)
    asked = []

    def others(decisions):
        asked.append(decisions)
        return [("experts whole", fast.decisions)]

    chosen, candidates = run_search(search.request, [MESH], pinned=False, others=others)
    assert asked == [slow.decisions]
    assert chosen.decisions == fast.decisions and chosen.prediction == fast.prediction
    assert [c.name for c in candidates] == ["fxpar", "other than experts whole"]
    assert candidates[0].prediction == fast.prediction and candidates[1].prediction == slow.prediction
    cost = fast.formulation.problem.cost(fast.formulation.assignment(fast.decisions))
    assert chosen.certificate.status == "feasible" and chosen.certificate.cost_ns == cost
    assert chosen.certificate.bound_ns <= cost


def test_a_slower_plan_is_shown_beside(search, fast, slow, monkeypatch):
    monkeypatch.setattr(Search, "manual", lambda self, mesh: [])
    monkeypatch.setattr(Search, "best", lambda self, mesh, roles, starts: fast)
    chosen, candidates = run_search(search.request, [MESH], pinned=False,
                                    others=lambda _: [("experts whole", slow.decisions)])
    assert chosen.decisions == fast.decisions
    assert [c.name for c in candidates] == ["fxpar", "experts whole"]
