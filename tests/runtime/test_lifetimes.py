"""Copies kept from forward to backward: the same results, fewer gatherings, more memory, as predicted."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.hubs import insert_hubs
from fxpar.plans.layout import Shard, replicated
from fxpar.plans.lifetimes import hub_partners, keep_copies
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Decisions
from fxpar.runtime.interpret import run_global
from fxpar.runtime.local import CollectiveStep, LocalProgram, collectives, type_bytes
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.runtime.virtual import run_virtual
from tests.runtime.small_programs import global_inputs, random_decisions, two_layers

torch.set_num_threads(1)


def cut_parameters(program, mesh) -> Decisions:
    """Everything whole but the stored parameters, which are cut: each use gathers."""
    whole, axes = replicated(mesh), len(mesh.axes)
    stored = tuple((Shard(0),) * axes if i.kind == "parameter" else whole for i in program.inputs)
    by_name = {i.name: lay for i, lay in zip(program.inputs, stored, strict=True)}
    outputs = tuple(by_name[o.name] if o.kind == "gradient" else whole for o in program.outputs)
    return Decisions(mesh, ((".",) * axes,) * len(program.nodes), stored, outputs)


def gathered(local: LocalProgram) -> int:
    return sum(len(s.values) for s in collectives(local) if s.kind == "all_gather")


@settings(max_examples=40)
@given(st.sampled_from(["1", "2", "3", "2x2", "2x3"]), st.integers(0, 10**9), st.booleans())
def test_any_kept_copies_compute_the_same(mesh, seed, recompute):
    program = insert_hubs(two_layers(batch=4))
    decisions = random_decisions(program, parse_mesh(mesh), random.Random(seed), recompute)
    inputs = global_inputs(program, seed)
    result = run_virtual(program, decisions, inputs)
    for got, want in zip(result.outputs, run_global(program, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert max(result.disagreement) == 0.0


def test_one_gathering_instead_of_two_and_its_bytes_live_until_backward():
    program = insert_hubs(two_layers(batch=2, inner=64, hidden=48, out=32))
    mesh = parse_mesh("4")
    plain = cut_parameters(program, mesh)
    hubs = list(hub_partners(program))
    assert len(hubs) == 1  # w1 is read in forward only: no gradient flows to the input
    kept = keep_copies(program, plain, hubs)
    local, other = local_of(program, plain), local_of(program, kept)
    assert (gathered(local), gathered(other)) == (3, 2)
    late = [s for s in other.steps if isinstance(s, CollectiveStep) and s.phase == "backward"]
    assert all(s.kind != "all_gather" for s in late)
    assert crossing(other) - crossing(local) == 48 * 32 * 8 * 3 // 4  # the whole copy instead of the stored quarter
    inputs = global_inputs(program)
    for decisions in (plain, kept):
        for got, want in zip(run_virtual(program, decisions, inputs).outputs, run_global(program, inputs), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def local_of(program, decisions: Decisions) -> LocalProgram:
    return rewrite(program, decisions, (0,) * len(decisions.mesh.axes))


def crossing(local: LocalProgram) -> int:
    """Bytes of parameters, whole or cut, that backward reads and forward or the surface made."""
    late = {v for s in local.steps if s.phase == "backward" for v in s.reads}
    made = {v for s in local.steps if s.phase == "backward" for v in s.writes}
    parameters = {v for v, shape in enumerate(local.types) if shape.shape in ((48, 32), (12, 32))}
    return sum(type_bytes(local.types[v]) for v in (late - made) & parameters)
