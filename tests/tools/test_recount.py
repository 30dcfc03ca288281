"""What plans are chosen by is what they cost: the objective, counted again from the program that runs."""

import dataclasses
import json
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.compile import compile_model
from fxpar.cost.cluster import parse_cluster
from fxpar.formulate import Formulation, formulate
from fxpar.plans.mesh import parse_mesh
from fxpar.prices import Prices
from fxpar.solver.random_assignment import random_assignment
from tests.compiled import adamw, captured, decoder_program, mlp_program
from tools.recount import CLUSTERS, HEADER, LIMIT, MODELS, Row, cells, main, markdown, parse, recount, row_of

torch.set_num_threads(1)
PROGRAMS = {"mlp": mlp_program, "decoder": decoder_program}
MACHINES = {"1x4:h100": ("4", "2x2"), "2x3:a10": ("6", "2x3")}


@cache
def problem(name: str, precision: str, cluster: str, mesh: str, recompute: bool, tied: bool) -> Formulation:
    on = parse_mesh(mesh)
    return formulate(
        PROGRAMS[name](precision), on, Prices(parse_cluster(cluster), on), budget_bytes=None, optimizer_bytes=adamw,
        recompute=None if recompute else (), tied=tied,
    )


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(PROGRAMS)), st.sampled_from(["fp32", "bf16"]), st.sampled_from(sorted(MACHINES)),
    st.sampled_from([0, 1]), st.booleans(), st.booleans(), st.integers(0, 10**6),
)
def test_the_objective_of_any_decisions_is_their_recount(name, precision, cluster, which, recompute, tied, seed):
    """Not only of solved plans: of whatever the solver may say. Every use makes its own reshard, as it is priced; that
    equal ones are made once when the plan runs, and none that nobody reads, can only be less."""
    form = problem(name, precision, cluster, MACHINES[cluster][which], recompute, tied)
    assignment = random_assignment(form.problem, seed)
    decisions, machine = form.decisions(assignment), parse_cluster(cluster)
    cost = form.problem.cost(assignment)
    assert recount(form.program, decisions, machine, as_written=True) == cost
    assert recount(form.program, decisions, machine) <= cost
