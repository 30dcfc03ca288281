"""The simulator against the thing itself: bytes that virtual ranks hold, and laws that no schedule breaks."""

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.candidates import Request
from fxpar.plans.layout import replicated
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, Ref, TensorType
from fxpar.progress import silent
from fxpar.random_plan import random_decisions
from fxpar.recompute import LEVELS, recompute_nodes
from fxpar.replay_memory import gradient_positions, replay_memory, storage_roots
from fxpar.restrict import roles_of
from fxpar.runtime.local import CollectiveStep, LocalProgram, OpStep, WaitStep
from fxpar.runtime.rewrite.in_flight import bound_reductions
from fxpar.runtime.rewrite.legality import check
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.search import Search
from fxpar.simulate import replay_static, replay_time, simulate
from fxpar.solver.solve import solve
from fxpar.waits import Watched
from tests.compiled import adamw, decoder_program, mlp_program, prices
from tests.tight_bound import tight_bound
from tests.virtual_memory import virtual_peaks

torch.set_num_threads(1)


def values_of(program: Program) -> dict[int, torch.Tensor]:
    """Any global value for every input."""
    found = {}
    for item in program.inputs:
        kind = program.types[item.value]
        dtype = getattr(torch, kind.dtype)
        if dtype.is_floating_point:
            found[item.value] = torch.ones(kind.shape, dtype=dtype)
        else:
            found[item.value] = torch.zeros(kind.shape, dtype=dtype)
    return found


def plain(program: Program, mesh: str) -> Decisions:
    """Everything whole everywhere."""
    on = parse_mesh(mesh)
    whole = replicated(on)
    return Decisions(on, ((".",) * len(on.axes),) * len(program.nodes), (whole,) * len(program.inputs),
                     (whole,) * len(program.outputs))


def named_decisions(program: Program, mesh: str) -> Decisions:
    """The solver's decisions under these names of axes."""
    on = parse_mesh(mesh)
    request = Request(program, lambda _: prices(mesh), 2**40, adamw, 0, 0.01, silent)
    form = Search(request).formulate(on, roles_of(on), False, None, ())
    return form.decisions(solve(form.problem).assignment)


def first_rank(program: Program, decisions: Decisions) -> LocalProgram:
    return rewrite(program, decisions, (0,) * len(decisions.mesh.axes))


@pytest.mark.parametrize(("mesh", "level"), [("1", "none"), ("dp=2", "none"), ("tp=2", "none"), ("dp=2,tp=2", "none"),
                                             ("1", "cheap"), ("dp=2", "layers")])
def test_memory_is_that_of_the_tensors_alive(mesh, level):
    program = decoder_program(width=64, heads=4, layers=3, batch=8, length=32)
    decisions = plain(program, mesh) if mesh == "1" else named_decisions(program, mesh)
    decisions = msgspec.structs.replace(decisions, recompute=recompute_nodes(program, level))
    memory = replay_memory(first_rank(program, decisions), gradient_positions(program))
    measured = max(virtual_peaks(program, decisions, values_of(program)))
    assert abs(memory.peak - measured) <= 0.01 * measured
    assert 0 < memory.activations < memory.peak


@settings(max_examples=15)
@given(st.sampled_from(["2", "3", "2x2"]), st.integers(0, 10**6))
def test_memory_under_any_decisions(mesh, seed):
    program = mlp_program(width=64, hidden=96, batch=16)
    decisions = random_decisions(program, parse_mesh(mesh), seed)
    memory = replay_memory(first_rank(program, decisions), gradient_positions(program))
    measured = max(virtual_peaks(program, decisions, values_of(program)))
    assert abs(memory.peak - measured) <= 0.03 * measured


def test_static_bytes_are_those_of_the_stored_shards():
    program = decoder_program()
    for mesh, parts in (("1", 1), ("dp=2", 1), ("tp=2", 2)):
        decisions = plain(program, mesh) if mesh == "1" else named_decisions(program, mesh)
        static = replay_static(program, first_rank(program, decisions), adamw)
        whole = sum(4 * math.prod(program.types[i.value].shape) for i in program.inputs if i.kind == "parameter")
        assert whole / parts <= static.parameters <= whole
        assert static.gradients == static.parameters and static.optimizer == 2 * static.parameters
        assert parts == 1 or static.parameters < 0.8 * whole


@settings(max_examples=20)
@given(st.sampled_from(["mlp", "decoder"]), st.sampled_from(["1", "2", "3", "2x2"]), st.integers(0, 10**6))
def test_laws_of_time(name, mesh, seed):
    program = {"mlp": mlp_program, "decoder": decoder_program}[name]()
    decisions = random_decisions(program, parse_mesh(mesh), seed)
    local = first_rank(program, decisions)
    line = replay_time(local, prices(mesh))
    assert max(line.compute_ns, line.communication_ns) <= line.step_ns <= line.compute_ns + line.communication_ns
    assert line.exposed_ns == line.step_ns - line.compute_ns >= 0
    collectives = [s for s in local.steps if isinstance(s, CollectiveStep)]
    assert sum(t.count for t in line.totals) == len(collectives)
    assert sum(t.bytes for t in line.totals) == sum(s.bytes for s in collectives)
    assert sum(t.ns for t in line.totals) == line.communication_ns
    if not collectives:
        assert line.exposed_ns == line.communication_ns == 0
    prediction = simulate(program, decisions, prices(mesh), adamw)
    assert (prediction.step_ns, prediction.collectives) == (line.step_ns, line.totals)
    assert prediction.peak_bytes >= prediction.parameter_bytes + prediction.optimizer_bytes
    assert prediction == simulate(program, decisions, prices(mesh), adamw)


@settings(max_examples=20)
@given(st.sampled_from(["mlp", "decoder"]), st.sampled_from(["2", "2x2"]), st.integers(0, 10**6))
def test_waiting_for_reductions_takes_time_only_where_compute_stands_still(name, mesh, seed):
    program = {"mlp": mlp_program, "decoder": decoder_program}[name]()
    decisions = random_decisions(program, parse_mesh(mesh), seed)
    with tight_bound(limit=2**60):
        free = first_rank(program, decisions)
    with tight_bound():
        bounded = first_rank(program, decisions)
    watched = Watched([], [])
    before, after = replay_time(free, prices(mesh)), replay_time(bounded, prices(mesh), watched)
    assert (before.compute_ns, before.totals) == (after.compute_ns, after.totals)
    assert before.step_ns <= after.step_ns == after.compute_ns + sum(end - start for start, end in watched.stalls)


def test_waiting_for_reductions_is_free_where_compute_covers_them():
    program = mlp_program(width=256, hidden=1024, layers=4, batch=65536)
    decisions = named_decisions(program, "dp=2")
    lines = []
    for limit in (0, 2**60):
        with tight_bound(limit=limit):
            local = first_rank(program, decisions)
        assert any(isinstance(s, WaitStep) for s in local.steps) == (limit == 0)
        lines.append(replay_time(local, prices("dp=2", "1x2:h100")))
    assert lines[0] == lines[1]


def test_compute_starts_when_the_reduction_waited_for_is_done():
    gradient, other = TensorType((2**22,), "float32"), TensorType((2**28,), "float32")
    reductions = [
        CollectiveStep("all_reduce", 0, "sum", (v,), (4 + v,), (), 2**22, "float32", "backward") for v in range(3)
    ]
    work = OpStep("aten.mul.Tensor", (Ref(3), Ref(3)), (3,), (7,), 0, "backward")
    types = (*[gradient] * 3, other, *[gradient] * 3, other)
    local = LocalProgram(parse_mesh("2"), (0,), types, ((-1, ()),) * 8, (0, 1, 2, 3), (*reductions, work), (4, 5, 6, 7))
    bounded = check(bound_reductions(local, 2 * 2**24))
    assert bounded.steps == (*reductions[:2], WaitStep((4,), "backward"), reductions[2], work)
    on = prices("2", "1x2:h100")
    before, after = replay_time(local, on), replay_time(bounded, on)
    assert before.step_ns == before.compute_ns > before.communication_ns
    assert after.step_ns == before.step_ns + on.collective_ns("all_reduce", 0, 2**24)


def test_one_rank_talks_to_nobody():
    program = decoder_program()
    prediction = simulate(program, plain(program, "1"), prices("1"), adamw)
    assert prediction.communication_ns == prediction.exposed_ns == 0 and prediction.collectives == ()
    assert prediction.step_ns == prediction.compute_ns > 0


def test_a_faster_link_and_more_recomputation():
    program = decoder_program(width=64, heads=4, layers=3, batch=8, length=32)
    decisions = named_decisions(program, "dp=2")
    level = {
        name: simulate(program, msgspec.structs.replace(decisions, recompute=recompute_nodes(program, name)),
                       prices("dp=2"), adamw)
        for name in LEVELS
    }
    assert level["none"].peak_bytes > level["cheap"].peak_bytes > level["layers"].peak_bytes
    assert level["none"].compute_ns < level["cheap"].compute_ns < level["layers"].compute_ns
    fast = simulate(program, decisions, prices("dp=2", "1x2:h100"), adamw)
    assert fast.step_ns < level["none"].step_ns and fast.peak_bytes == level["none"].peak_bytes


def test_views_share_what_they_look_at():
    program = decoder_program()
    local = first_rank(program, plain(program, "1"))
    root = storage_roots(local)
    for step in local.steps:
        if isinstance(step, OpStep) and step.op in ("aten.t.default", "aten.transpose.int", "aten.permute.default"):
            assert root[step.outputs[0]] == root[step.operands[0]]
        if isinstance(step, OpStep) and step.op in ("aten.mm.default", "aten.add.Tensor", "aten.addmm.default"):
            assert root[step.outputs[0]] == step.outputs[0]
