"""The whole choice: what it finds is what trying every shape finds, and what an expert would expect."""

from __future__ import annotations

import pytest
import torch

from fxpar.candidates import Request, natural_meshes
from fxpar.captured import capture_program
from fxpar.choose import Examination, Examined, Survey, choose
from fxpar.compile import compile_model
from fxpar.cost.cluster import parse_cluster
from fxpar.open_model import open_model
from fxpar.plans.codec import decode, encode
from fxpar.plans.errors import Infeasible
from fxpar.prices import Prices
from fxpar.progress import silent
from fxpar.restrict import roles_of
from fxpar.search import run_search
from fxpar.show_search import search_text
from tests.compiled import decoder_source

torch.set_num_threads(1)


def optimizer_bytes(dtype, name):
    return 8


def asked(source, cluster, budget):
    """(model, request, the search on one axis of all ranks) of a source on a cluster."""
    captured = capture_program(source, outputs=("loss",), precision="fp32", progress=silent)
    model = open_model(source, captured, ("loss",), "fp32", optimizer_bytes, silent)
    known = {}
    request = Request(captured[0], lambda mesh: known.setdefault(mesh, Prices(cluster, mesh)), budget, optimizer_bytes,
                      source.batch_dim, 0.01, silent, "auto")
    return model, request, lambda: run_search(request, natural_meshes(cluster.nodes, cluster.devices_per_node),
                                              pinned=False)


def every_shape(model, cluster, request):
    """The fastest of all shapes, each searched in full."""
    found = []
    for one in Survey(model, cluster, request.budget_bytes).estimates():
        examination = Examination(model, cluster, request, one)
        found.append(examination.refined(examination.sketched()))
    return min(found, key=lambda e: e.step_ns)


def check_against_every_shape(layers, width, batch, text, budget):
    cluster = parse_cluster(text)
    source = decoder_source(width=width, layers=layers, batch=batch)
    model, request, natural = asked(source, cluster, budget)
    choice = choose(model, cluster, request, natural)
    best = every_shape(model, cluster, request)
    assert choice.prediction.step_ns <= best.step_ns * 1.01
    assert choice.prediction.peak_bytes <= budget
    return choice


def test_the_choice_is_the_best_of_every_shape():
    check_against_every_shape(2, 64, 4, "1x2:h100", 2**34)


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(("layers", "width", "batch", "text", "budget"), [
    (4, 256, 8, "1x4:a100", 2**34), (12, 512, 16, "2x4:l40s", 2**28), (8, 512, 8, "8x1:a100", 2**34),
])
def test_the_choice_is_the_best_of_every_shape_of_larger_spaces(layers, width, batch, text, budget):
    check_against_every_shape(layers, width, batch, text, budget)


def test_a_plan_says_what_was_weighed_and_why_it_lost():
    plan = compile_model(decoder_source(layers=2, batch=4), cluster="1x2:h100").plan
    assert plan.considered
    assert sum(not c.lost for c in plan.considered) == 1
    chosen = next(c for c in plan.considered if not c.lost)
    assert chosen.step_ns == plan.prediction.step_ns
    assert all(c.step_ns is None or c.step_ns >= chosen.step_ns for c in plan.considered)
    assert decode(encode(plan)) == plan
    text = search_text(plan)
    assert all(f"{c.pp} x {c.dp} x {c.tp}" in text for c in plan.considered)
    assert "chosen" in text


def test_a_mesh_that_is_asked_for_is_the_only_one():
    plan = compile_model(decoder_source(layers=2, batch=4), mesh="2").plan
    assert plan.considered == ()
    assert roles_of(plan.decisions.mesh) == ("",)


@pytest.mark.parametrize("large", [0, 10**9])
def test_what_fits_nowhere_is_refused_with_numbers(large, monkeypatch):
    monkeypatch.setattr("fxpar.choose.LARGE", large)
    with pytest.raises(Infeasible, match="does not fit") as caught:
        compile_model(decoder_source(layers=2, batch=4), cluster="1x2:h100", memory=2**17)
    assert caught.value.numbers and caught.value.way_out


def test_the_clusters_own_meshes_are_the_last_resort_of_large_programs(monkeypatch):
    monkeypatch.setattr("fxpar.choose.LARGE", 0)
    monkeypatch.setattr("fxpar.choose.sketched", lambda *asked: Examined(asked[-1], note="does not fit"))
    monkeypatch.setattr("fxpar.choose.refine", lambda *asked: asked[-1])
    plan = compile_model(decoder_source(layers=2, batch=4), cluster="1x2:h100").plan
    assert plan.decisions.mesh.sizes == (2,)
    assert {c.name for c in plan.candidates} >= {"fxpar", "data parallel", "ZeRO-3"}
