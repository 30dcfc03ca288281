"""The search: never worse than what it is compared with, within the memory or an error in numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.candidates import Found, manual_roles, natural_meshes, too_large
from fxpar.compile import compile_model
from fxpar.plans.check import plan_problems
from fxpar.plans.errors import FxparError, Infeasible
from fxpar.plans.layout import Partial, Shard
from fxpar.plans.mesh import parse_mesh
from fxpar.random_plan import random_decisions
from fxpar.runtime.interpret import run_global
from fxpar.runtime.virtual import rewrite_all, run_virtual
from fxpar.simulate import simulate
from fxpar.stored import stored_layouts
from tests.compiled import VOCAB, adamw, captured, decoder_plan, decoder_program, mlp_plan, mlp_program, prices

torch.set_num_threads(1)
MIB = 2**20


@pytest.mark.parametrize("make", [mlp_plan, decoder_plan])
@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_the_plan_is_never_worse_than_a_candidate(make, mesh):
    plan = make(mesh)
    chosen = plan.candidates[0]
    assert chosen.prediction == plan.prediction and chosen.fits
    for candidate in plan.candidates:
        if candidate.fits:
            assert plan.prediction.step_ns <= candidate.prediction.step_ns, candidate.name
    names = [c.name for c in plan.candidates]
    assert {"data parallel", "ZeRO-3"} <= set(names) and any("Megatron" in n for n in names)
    assert plan.certificate.bound_ns <= plan.certificate.cost_ns
    assert plan.certificate.gap <= 0.01 + 1e-9 or plan.certificate.status == "feasible"
    assert list(plan_problems(plan)) == []


def test_a_big_batch_on_fast_links_is_split():
    """On a GPU node with a batch worth splitting, the step takes less than on one device."""
    sizes = {"width": 256, "heads": 4, "layers": 1, "batch": 64, "length": 128}
    taken, source = captured("decoder", **sizes)
    on = parse_mesh("1")
    alone = random_decisions(taken[0], on, 0)  # one rank has one way
    one = simulate(taken[0], alone, prices("1", "1x1:h100"), adamw)
    plan = compile_model(source, cluster="1x4:h100", captured=taken).plan
    assert plan.prediction.step_ns < 0.8 * one.step_ns
    assert {c.mesh.sizes for c in plan.candidates} == {(4,), (2, 2)}


@pytest.fixture(scope="module")
def big():
    """A model whose parameters, gradients and moments are most of the memory."""
    taken, source = captured("decoder", width=256, heads=4, layers=2, batch=8, length=16)
    return taken, source, compile_model(source, mesh="dp=4", captured=taken).plan


def test_less_memory_than_data_parallel_needs_is_found(big):
    taken, source, dp = big
    peak = dp.prediction.peak_bytes
    assert dp.prediction.parameter_bytes * 4 <= peak
    plan = compile_model(source, mesh="4", memory=peak // 2, captured=taken).plan
    again = simulate(plan.program, plan.decisions, prices("4"), adamw)
    assert again == plan.prediction and again.peak_bytes <= peak // 2
    stored = zip(plan.program.inputs, plan.decisions.inputs, strict=True)
    assert any(i.kind == "parameter" and isinstance(lay[0], Shard) for i, lay in stored)


def test_named_dp_axes_cut_parameters_where_memory_binds(big):
    taken, source, dp = big
    budget = int(0.65 * dp.prediction.peak_bytes)
    plan = compile_model(source, mesh="dp=4", memory=budget, captured=taken).plan
    assert plan.prediction.peak_bytes <= budget and plan.certificate.status == "pinned"
    stored = zip(plan.program.inputs, plan.decisions.inputs, strict=True)
    assert any(i.kind == "parameter" and isinstance(lay[0], Shard) for i, lay in stored)
    assert not any(i.kind == "parameter" and isinstance(lay[0], Shard)
                   for i, lay in zip(dp.program.inputs, dp.decisions.inputs, strict=True))


@pytest.mark.parametrize(("mesh", "name"), [("dp=4", "ZeRO-3"), ("tp=4", "Megatron tensor parallel"), ("4", "ZeRO-3")])
def test_a_hand_made_plan_that_obeys_the_names_is_taken_where_only_it_fits(big, mesh, name):
    taken, source, dp = big
    budget = next(c.prediction.peak_bytes for c in dp.candidates if c.name == name)
    plan = compile_model(source, mesh=mesh, memory=budget, captured=taken).plan
    assert plan.prediction.peak_bytes <= budget and plan.candidates[0].fits
    assert plan.certificate.bound_ns <= plan.certificate.cost_ns
    if mesh != "4":
        assert plan.certificate.status == "pinned"


def test_a_hand_made_plan_is_held_against_the_bound_of_the_free_problem():
    taken, source = captured("decoder", width=256, heads=4, layers=2, batch=8, length=16)
    free = compile_model(source, mesh="4", captured=taken).plan
    budget = next(c.prediction.peak_bytes for c in free.candidates if c.name == "data parallel")
    plan = compile_model(source, mesh="4", memory=budget, captured=taken).plan
    if plan.candidates[0].name != "fxpar":
        assert plan.certificate.status == "feasible"
        assert plan.certificate.bound_ns <= plan.certificate.cost_ns


def test_axes_that_stand_in_the_way_are_named(big):
    """Something fits, but not under the names the user gave."""
    _, _, plan = big
    pinned = Found("fxpar", plan.decisions, plan.prediction, plan.certificate, False)
    other = Found("ZeRO-3", plan.decisions, plan.prediction, plan.certificate, True)
    text = str(too_large([pinned, other], plan.prediction.peak_bytes))
    assert "no plan with these mesh axes fits" in text and "ZeRO-3" in text and "--mesh 4" in text
    assert "the model does not fit: it needs" in str(too_large([pinned], MIB))
    assert "no plan found within 1.0 MiB" in str(too_large([], MIB))


def test_recomputation_is_used_where_activations_bind():
    taken, source = captured("decoder", width=64, heads=4, layers=3, batch=16, length=64)
    free = compile_model(source, mesh="dp=2", captured=taken).plan
    assert free.decisions.recompute == ()
    assert free.prediction.activation_bytes > 0.6 * free.prediction.peak_bytes
    tight = compile_model(source, mesh="dp=2", memory=int(0.6 * free.prediction.peak_bytes), captured=taken).plan
    assert tight.decisions.recompute and tight.prediction.peak_bytes <= 0.6 * free.prediction.peak_bytes
    assert tight.prediction.compute_ns > free.prediction.compute_ns
    assert "recomputes" in tight.candidates[0].note
    with pytest.raises(Infeasible):
        compile_model(source, mesh="dp=2", memory=int(0.3 * free.prediction.peak_bytes), captured=taken,
                      recompute="off")
    always = compile_model(source, mesh="dp=2", captured=taken, recompute="on").plan
    assert len(always.decisions.recompute) >= len(tight.decisions.recompute)


@pytest.mark.parametrize("mesh", ["2", "dp=2"])
def test_what_never_fits_is_an_error_in_numbers(big, mesh):
    taken, source, _ = big
    with pytest.raises(Infeasible) as caught:
        compile_model(source, mesh=mesh, memory=MIB, captured=taken)
    text = str(caught.value)
    assert "does not fit" in text and "of 1.0 MiB per device" in text and "--memory" in text
    assert "parameters" in text and "optimizer" in text


@settings(max_examples=25)
@given(st.sampled_from(["mlp", "decoder"]), st.sampled_from(["1", "2", "3", "2x2", "2x3"]), st.integers(0, 10**9))
def test_random_decisions_are_always_accepted(name, mesh, seed):
    program = {"mlp": mlp_program, "decoder": decoder_program}[name]()
    decisions = random_decisions(program, parse_mesh(mesh), seed)
    assert decisions == random_decisions(program, parse_mesh(mesh), seed)
    rewrite_all(program, decisions)
    for item, layout in zip(program.inputs, decisions.inputs, strict=True):
        assert layout in stored_layouts(item, program.dims[item.value], decisions.mesh)
        assert not any(isinstance(p, Partial) for p in layout)


@settings(max_examples=5)
@given(st.sampled_from(["2", "3", "2x2"]), st.integers(0, 10**9))
def test_random_decisions_compute_the_same(mesh, seed):
    program = decoder_program(layers=1)
    values = {}
    for item in program.inputs:
        kind = program.types[item.value]
        generator = torch.Generator().manual_seed(item.value)
        if kind.dtype == "int64":
            values[item.value] = torch.randint(0, VOCAB, kind.shape, generator=generator)
        else:
            values[item.value] = torch.randn(kind.shape, generator=generator) / 4
    values |= {i.value: torch.ones(()) for i in program.inputs if i.kind == "tangent"}
    result = run_virtual(program, random_decisions(program, parse_mesh(mesh), seed), values)
    for got, want in zip(result.outputs, run_global(program, values), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert max(result.disagreement) == 0.0


def test_other_seeds_are_other_decisions():
    program = decoder_program()
    drawn = {random_decisions(program, parse_mesh("2"), seed).choices for seed in range(5)}
    assert len(drawn) == 5


def test_meshes_that_are_tried():
    def sizes(*of):
        return [m.sizes for m in natural_meshes(*of)]

    assert sizes(1, 1) == [(1,)]
    assert sizes(1, 2) == [(2,)]
    assert sizes(1, 8) == [(8,), (2, 4)]
    assert sizes(2, 8) == [(2, 8), (16,)]
    assert sizes(4, 1) == [(4,)]
    assert sizes(1, 6) == [(6,), (2, 3)]
    assert all(math.prod(s) == 8 for s in sizes(1, 8))


def test_hand_made_plans_have_roles_for_every_axis():
    for mesh in ("2", "2x2", "2x2x2"):
        for name, roles, sharded in manual_roles(parse_mesh(mesh)):
            assert len(roles) == len(parse_mesh(mesh).axes) and set(roles) <= {"dp", "tp"}
            assert sharded == (name == "ZeRO-3")


def test_a_random_plan_says_so():
    plan = mlp_plan("2", random_choices=7)
    assert plan.certificate.status == "random" and plan.candidates == ()
    assert plan.decisions == random_decisions(plan.program, parse_mesh("2"), 7)


@pytest.mark.parametrize("request_", [{"outputs": ("x",)}])
def test_what_this_version_does_not_do_is_refused(request_):
    with pytest.raises(FxparError, match="cannot be chosen"):
        taken, source = captured("mlp")
        compile_model(source, mesh="2", captured=taken, **request_)
