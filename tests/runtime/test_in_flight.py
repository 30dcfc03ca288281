"""Waits for gradient reductions: within the bound, only where it would be exceeded, and results to the bit."""

from dataclasses import replace
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.microbatches import split_in_time
from fxpar.plans.mesh import parse_mesh
from fxpar.random_plan import random_decisions
from fxpar.runtime.execute import build
from fxpar.runtime.groups import connect
from fxpar.runtime.local import AddStep, WaitStep, collectives
from fxpar.runtime.pieces import scatter
from fxpar.runtime.rewrite.bucket import bucket_reductions
from fxpar.runtime.rewrite.in_flight import bound_reductions
from fxpar.runtime.rewrite.legality import IllegalProgram, check, collective_signature, structure
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.microbatches import pieces
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.runtime.rewrite.stage_pieces import stage_decisions, stage_pieces, stages_of
from fxpar.runtime.virtual import pieces_of_all, run_virtual
from fxpar.step_values import input_values
from tests.compiled import decoder_program, mlp_program
from tests.runtime.pipelines import batch, built, staged_plan
from tests.tight_bound import tight_bound, under_way
from tools.forked_ranks import forked_ranks

torch.set_num_threads(1)


def waits(local):
    return [s for s in local.steps if isinstance(s, WaitStep)]


@cache
def repeating():
    return split_in_time(mlp_program(layers=3), 2)


def drawn_values(program):
    """Of the whole batch."""
    generator, found = torch.Generator().manual_seed(0), {}
    for position, item in enumerate(program.inputs):
        shape = list(program.types[item.value].shape)
        if program.time is not None and (cut := program.time.inputs[position]) >= 0:
            shape[cut] *= program.time.count
        found[item.value] = torch.randn(shape, generator=generator)
    return found


@settings(max_examples=40)
@given(st.sampled_from(["mlp", "decoder"]), st.sampled_from(["2", "3", "2x2"]), st.integers(0, 10**6),
       st.sampled_from([0, 1000, 5000]), st.sampled_from([0, 2000, 10_000, 2**40]))
def test_what_is_under_way_stays_within_the_bound(name, mesh, seed, bucket, limit):
    program = {"mlp": mlp_program, "decoder": decoder_program}[name]()
    mesh = parse_mesh(mesh)
    decisions = random_decisions(program, mesh, seed)
    ranks = []
    for rank in range(mesh.world_size):
        before = bucket_reductions(localise(program, decisions, mesh.coordinates(rank)), bucket)
        after = check(bound_reductions(before, limit))
        assert [s for s in after.steps if not isinstance(s, WaitStep)] == list(before.steps)
        ranks.append(after)
        for flight in under_way(before, after):
            assert len(flight) <= 2 or sum(s.bytes for s in flight) <= limit
        if all(len(f) <= 2 or sum(s.bytes for s in f) <= limit for f in under_way(before, before)):
            assert after == before
    assert len({structure(one) for one in ranks}) == 1
    assert len({collective_signature(one) for one in ranks}) == 1


def test_gradients_of_every_layer_are_waited_for():
    program = mlp_program(layers=3)
    mesh = parse_mesh("2")
    with tight_bound():
        local = next(local for seed in range(20)
                     if (local := rewrite(program, random_decisions(program, mesh, seed), (0,))) and waits(local))
    assert len(waits(rewrite(program, random_decisions(program, mesh, 0), (0,)))) == 0  # too small for the real bound
    other = waits(local)[0]
    with pytest.raises(IllegalProgram, match="which no collective makes together"):
        check(replace(local, steps=(*local.steps, replace(other, values=(*other.values, local.inputs[0])))))


@settings(max_examples=20)
@given(st.sampled_from(["2", "2x2"]), st.integers(0, 10**6), st.booleans())
def test_the_virtual_mesh_gives_the_same(mesh, seed, repeats):
    program = repeating() if repeats else mlp_program(layers=3)
    decisions = random_decisions(program, parse_mesh(mesh), seed)
    inputs = drawn_values(program)
    with tight_bound(limit=2**40):
        plain = run_virtual(program, decisions, inputs)
    with tight_bound():
        bounded = run_virtual(program, decisions, inputs)
    for a, b in zip(plain.pieces, bounded.pieces, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_total_grows_where_its_summand_is_waited_for():
    program, mesh = repeating(), parse_mesh("2")
    found = 0
    for seed in range(20):
        decisions = random_decisions(program, mesh, seed)
        with tight_bound():
            parts = pieces_of_all(program, decisions)[0]
        steps = parts.backward.steps
        made = {v for c in collectives(parts.backward) for v in c.outputs}
        added = {s.value for s in steps if isinstance(s, AddStep)}
        for place, step in enumerate(steps):
            if isinstance(step, WaitStep) and (summands := added & made & set(step.values)):
                found += 1
                after = steps[place + 1 : place + 1 + len(summands)]
                assert {s.value for s in after if isinstance(s, AddStep)} == summands
    assert found


def test_waits_go_with_the_part_of_backward_that_reduces():
    plan = staged_plan("gpt2", "dp=2,pp=2", "1f1b", 2, choices=5, seed=5)
    program, decisions = plan.program, plan.decisions
    stages = stages_of(program, decisions)
    with tight_bound():
        count = 0
        for stage, own in zip(stages.stages, stage_decisions(program, decisions, stages), strict=True):
            parts = stage_pieces(stage, own, (0,) * len(own.mesh.axes))
            split = [waits(p) for p in (parts.backward_inputs, parts.backward_weights)]
            assert sum(map(len, split)) == len(waits(parts.backward))
            count += sum(len(waits(p)) for p in parts.programs)
        assert count
        model, (args, kwargs) = built("gpt2"), batch("gpt2")
        inputs = input_values(program, model, args, kwargs, seed=3)
        bounded = run_virtual(program, decisions, inputs)
    plain = run_virtual(program, decisions, inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain.outputs, bounded.outputs, strict=True))


def run_code(program, seed, limit):
    """What generated code returns on this rank, and how often it waits."""
    groups, inputs = connect(parse_mesh("2")), drawn_values(program)
    decisions = random_decisions(program, groups.mesh, seed)
    with tight_bound(limit=limit):
        local = rewrite(program, decisions, groups.coords)
    code = build(program, local, groups)
    own = {
        e.value: scatter(inputs[e.value], program.dims[e.value], lay, decisions.mesh, groups.coords)
        for e, lay in zip(program.inputs, decisions.inputs, strict=True)
    }
    forward = code.forward([own[program.inputs[i].value] for i in code.halves.forward_inputs])
    count = len(code.halves.kept_outputs)
    tangent = [own[e.value] for e in program.inputs if e.kind == "tangent"]
    return [*forward[:count], *code.backward([*forward[count:], *tangent])], len(waits(local))


def test_generated_code_gives_the_same_on_gloo_ranks(tmp_path):
    program = mlp_program(layers=3)

    def body():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        count = 0
        for seed in range(6):
            (plain, none), (bounded, waited) = (run_code(program, seed, limit) for limit in (2**40, 0))
            assert none == 0 and all(torch.equal(a, b) for a, b in zip(plain, bounded, strict=True))
            count += waited
        assert count
        dist.barrier()

    end = forked_ranks(2, body, tmp_path, timeout=100)
    assert end.failures == (), end.failures[0][-3000:]


def test_the_epilogue_of_microbatches_waits_too():
    program, mesh = repeating(), parse_mesh("2")
    with tight_bound():
        found = [pieces(program, random_decisions(program, mesh, seed), (0,)) for seed in range(10)]
    assert any(waits(p.epilogue) for p in found) and any(waits(p.backward) for p in found)
