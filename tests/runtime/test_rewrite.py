"""The passes: same meaning, fewer and legal steps, the same sequence on every rank."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.plans.layout import Shard, replicated
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Ref
from fxpar.rules.choices import joint_choices, site_of
from fxpar.runtime.local import CollectiveStep, OpStep, collectives
from fxpar.runtime.rewrite.bucket import bucket_gathers, bucket_reductions
from fxpar.runtime.rewrite.dead import remove_dead_steps
from fxpar.runtime.rewrite.legality import IllegalProgram, check, collective_signature, structure
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.partition import partition
from fxpar.runtime.rewrite.passes import rewrite
from tests.runtime.small_programs import ProgramBuilder, pure_data_parallel, random_decisions, two_layers

torch.set_num_threads(1)


@settings(max_examples=40)
@given(st.sampled_from(["3", "2x2", "2x3"]), st.integers(0, 10**9), st.booleans())
def test_every_rank_runs_one_sequence(mesh, seed, recompute):
    program = two_layers(batch=5)
    mesh = parse_mesh(mesh)
    decisions = random_decisions(program, mesh, random.Random(seed), recompute)
    ranks = [rewrite(program, decisions, mesh.coordinates(rank)) for rank in range(mesh.world_size)]
    assert len({structure(one) for one in ranks}) == 1
    assert len({collective_signature(one) for one in ranks}) == 1


@settings(max_examples=40)
@given(st.sampled_from(["2", "2x2"]), st.integers(0, 10**9), st.booleans())
def test_both_halves_hold_every_step_once(mesh, seed, recompute):
    program = two_layers(batch=4)
    decisions = random_decisions(program, parse_mesh(mesh), random.Random(seed), recompute)
    local = rewrite(program, decisions, (0,) * len(decisions.mesh.axes))
    halves = partition(program, local)
    assert sorted(map(id, (*halves.forward.steps, *halves.backward.steps))) == sorted(map(id, local.steps))
    check(halves.forward)
    check(halves.backward)


def test_a_recomputed_node_saves_its_operands_instead():
    program = two_layers(batch=4)
    plain = pure_data_parallel(program, parse_mesh("2"))
    relu = next(i for i, n in enumerate(program.nodes) if n.op == "aten.relu.default")
    again = Decisions(plain.mesh, plain.choices, plain.inputs, plain.outputs, (relu,))
    saved = {}
    for name, decisions in (("plain", plain), ("again", again)):
        local = rewrite(program, decisions, (0,))
        saved[name] = {local.origins[v][0] for v in partition(program, local).saved}
        ops = [s.op for s in local.steps if isinstance(s, OpStep) and s.phase == "backward" and s.node == relu]
        assert ops == (["aten.relu.default"] if name == "again" else [])
    before, after = program.nodes[relu].args[0].id, program.nodes[relu].outputs[0]
    assert after in saved["plain"] and before not in saved["plain"]
    assert before in saved["again"] and after not in saved["again"]


def stored_in_shards(mesh):
    """Data parallel with every parameter sharded on its first dim: gathered for use, gradients reduce-scattered."""
    program = two_layers(batch=12)
    plain = pure_data_parallel(program, mesh)
    sharded = {e.name: (Shard(0),) for e in program.inputs if e.kind == "parameter"}
    inputs = tuple(sharded.get(e.name, lay) for e, lay in zip(program.inputs, plain.inputs, strict=True))
    outputs = tuple(sharded.get(o.name, lay) for o, lay in zip(program.outputs, plain.outputs, strict=True))
    return program, Decisions(mesh, plain.choices, inputs, outputs)


def test_sharded_parameters_travel_in_buckets():
    program, decisions = stored_in_shards(parse_mesh("4"))
    kinds = [(c.kind, c.phase, len(c.values)) for c in collectives(rewrite(program, decisions, (1,)))]
    assert sorted(kinds) == [
        ("all_gather", "backward", 1),  # the first layer's weight is not needed again
        ("all_gather", "forward", 2),
        ("all_reduce", "forward", 1),
        ("reduce_scatter", "backward", 2),
    ]


@pytest.mark.parametrize(("limit", "sizes"), [(0, [1, 1]), (10**9, [2])])
def test_a_bucket_holds_no_more_than_its_limit(limit, sizes):
    program, decisions = stored_in_shards(parse_mesh("2"))
    local = bucket_gathers(bucket_reductions(localise(program, decisions, (0,)), limit), limit)
    check(local)
    for kind, phase in (("all_gather", "forward"), ("reduce_scatter", "backward")):
        assert [len(c.values) for c in collectives(local) if (c.kind, c.phase) == (kind, phase)] == sizes


def test_dead_steps_go_and_their_collectives_with_them():
    p = ProgramBuilder()
    x = p.input("input", "x", ((4,), (6,)))
    y = p.op("aten.relu.default", Ref(x), dims=((4,), (6,)))
    p.op("aten.mul.Tensor", Ref(y), Ref(y), dims=((4,), (6,)))  # nobody reads it
    p.output(y, "output", "y")
    program, mesh = p.program(), parse_mesh("2")
    split, whole = (
        next(j.names for j in joint_choices(site_of(n, program), mesh) if j.inputs[0] == lay)
        for n, lay in zip(program.nodes, ((Shard(0),), replicated(mesh)), strict=True)
    )
    local = localise(program, Decisions(mesh, (split, whole), ((Shard(0),),), ((Shard(0),),)), (0,))
    assert [type(s) for s in local.steps] == [OpStep, CollectiveStep, OpStep]
    assert [type(s) for s in remove_dead_steps(local).steps] == [OpStep]


def test_illegal_programs_are_refused_with_every_violation():
    program = two_layers(batch=4)
    local = rewrite(program, pure_data_parallel(program, parse_mesh("2")), (0,))
    first, *rest = local.steps
    swapped = replace(local, steps=(*rest, first))
    with pytest.raises(IllegalProgram, match="before it is defined"):
        check(swapped)
    twice = replace(local, steps=(*local.steps, first))
    with pytest.raises(IllegalProgram, match="again"):
        check(twice)
    bucket = next(s for s in local.steps if isinstance(s, CollectiveStep) and len(s.values) == 2)
    late = replace(local, steps=tuple(replace(s, phase="forward") if s is bucket else s for s in local.steps))
    with pytest.raises(IllegalProgram, match="of backward"):
        check(late)
    reduction = next(s for s in local.steps if isinstance(s, CollectiveStep))
    short = replace(reduction, values=reduction.values[:1], outputs=reduction.outputs[:1], dtype="int64")
    with pytest.raises(IllegalProgram, match="is not int64"):
        check(replace(local, steps=tuple(short if s is reduction else s for s in local.steps)))
