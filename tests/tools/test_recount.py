"""What plans are chosen by is what they cost: the objective, counted again from the program that runs."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.captured import capture_program
from fxpar.compile import compile_model
from fxpar.cost.cluster import parse_cluster
from fxpar.formulate import Formulation, formulate
from fxpar.model_source import load_model_source
from fxpar.plans.mesh import parse_mesh
from fxpar.prices import Prices
from fxpar.progress import silent
from fxpar.solver.random_assignment import random_assignment
from fxpar.solver.solve import solve
from tests.compiled import adamw, captured, decoder_program, mlp_program
from tools.recount import CLUSTERS, HEADER, LIMIT, MODELS, Row, cells, main, markdown, parse, recount, row_of

torch.set_num_threads(1)
PROGRAMS = {"mlp": mlp_program, "decoder": decoder_program}
MODEL_FILES = sorted((Path(__file__).parent.parent / "models").glob("*.py"))
MACHINES = {"1x4:h100": ("4", "2x2"), "2x3:a10": ("6", "2x3")}


@cache
def problem(name: str, precision: str, cluster: str, mesh: str, what: str) -> Formulation:
    """``what``: "placement" alone, or with "lifetimes": recomputation and copies kept for backward, node by node; or
    those with layers "tied"."""
    on = parse_mesh(mesh)
    return formulate(
        PROGRAMS[name](precision), on, Prices(parse_cluster(cluster), on), budget_bytes=None, optimizer_bytes=adamw,
        recompute=() if what == "placement" else None, reuse="never" if what == "placement" else "free",
        tied=what == "tied",
    )


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(PROGRAMS)), st.sampled_from(["fp32", "bf16"]), st.sampled_from(sorted(MACHINES)),
    st.sampled_from([0, 1]), st.sampled_from(["placement", "lifetimes", "tied"]), st.integers(0, 10**6),
)
def test_the_objective_of_any_decisions_is_their_recount(name, precision, cluster, which, what, seed):
    """Not only of solved plans: of whatever the solver may say. Every use makes its own reshard, as it is priced; that
    equal ones are made once when the plan runs, and none that nobody reads, can only be less. So can what the members
    of a class of tied layers do not all need to run again."""
    form = problem(name, precision, cluster, MACHINES[cluster][which], what)
    decisions = form.decisions(random_assignment(form.problem, seed))
    assignment, machine = form.assignment(decisions), parse_cluster(cluster)
    assert assignment is not None
    cost, counted = form.problem.cost(assignment), recount(form.program, decisions, machine, as_written=True)
    assert counted == cost or (what == "tied" and counted < cost)
    assert recount(form.program, decisions, machine) <= cost


@pytest.mark.slow
@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_objective_and_recount_of_every_small_model(path):
    """Convolutions, windows, experts, routers, recurrences: the solved plan and three drawn ones are priced to the
    nanosecond, and the solved plan shares and drops nothing that its price does not know of."""
    source = load_model_source(str(path))
    program = capture_program(source, outputs=("loss",), precision="fp32", progress=silent)[0]
    machine, mesh = parse_cluster("2x4:l40s"), parse_mesh("8")
    form = formulate(program, mesh, Prices(machine, mesh), budget_bytes=None, optimizer_bytes=adamw)
    solved = solve(form.problem).assignment
    for assignment in (solved, *(random_assignment(form.problem, seed) for seed in range(3))):
        cost, decisions = form.problem.cost(assignment), form.decisions(assignment)
        assert recount(program, decisions, machine, as_written=True) == cost
        assert recount(program, decisions, machine) >= (1 - LIMIT) * cost * (assignment == solved)


@pytest.mark.parametrize(
    ("name", "precision", "mesh"), [("mlp", "fp32", "4"), ("mlp", "bf16", "2x2"), ("decoder", "bf16", "2x2")]
)
def test_the_certificate_of_a_solved_plan_is_its_recount(name, precision, mesh):
    """Two small models on two machines, with memory and without."""
    taken, source = captured(name, precision)
    free = compile_model(source, cluster="1x4:h100", mesh=mesh, captured=taken, precision=precision).plan
    tight = compile_model(source, cluster="2x2:l40s", mesh=mesh, captured=taken, precision=precision,
                          memory=int(0.8 * free.prediction.peak_bytes)).plan
    for plan, cluster in ((free, "1x4:h100"), (tight, "2x2:l40s")):
        row = row_of(plan, cluster, 0.0)
        assert abs(row.difference) <= LIMIT and not row.wrong
        assert row.manual and all(ratio >= 1 for ratio, needs in row.manual.values() if not needs)


def test_rows_become_tables():
    by_hand = {"data parallel": (1.5, 0), "ZeRO-3": (0.9, 2**31)}
    good = Row("a", "1x8:h100", "8", "fxpar", 10**6, 10**6, 10**6, 0.0, by_hand)
    assert not good.wrong
    assert cells(good)[7:] == ("1.500", "needs 2.0 GiB", "-", "-")
    assert dataclasses.replace(good, recount_ns=10**6 + 1001).wrong
    assert dataclasses.replace(good, manual={"ZeRO-3": (0.9, 0)}).wrong
    stopped = Row("b", "1x8:h100", error="the model does not fit")
    assert stopped.wrong and len(cells(stopped)) == len(HEADER)
    assert len(markdown([good, stopped]).splitlines()) == 4
    assert len(MODELS) == 8 and len(CLUSTERS) == 5
    assert parse(["--model", "bert-base", "--cluster", "1x2:h100"]).cluster == ["1x2:h100"]


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "resnet-50", dataclasses.replace(MODELS["resnet-50"], batch=8))
    file, page = tmp_path / "rows.json", tmp_path / "rows.md"
    code = main(["--model", "resnet-50", "--cluster", "1x2:h100", "--json", str(file), "--markdown", str(page)])
    assert code == 0
    assert json.loads(file.read_text())[0]["model"] == "resnet-50"
    assert page.read_text().startswith("| model |")
