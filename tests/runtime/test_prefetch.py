"""Gatherings issued early: the same steps, legal, within the limit, and worth it."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.plans.mesh import parse_mesh
from fxpar.runtime.local import CollectiveStep, LocalProgram, OpStep
from fxpar.runtime.rewrite.dead import remove_dead_steps
from fxpar.runtime.rewrite.legality import check, structure
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.prefetch import prefetch_gathers
from tests.runtime.small_programs import random_decisions, two_layers

torch.set_num_threads(1)


def gathers(local: LocalProgram) -> list[CollectiveStep]:
    return [s for s in local.steps if isinstance(s, CollectiveStep) and s.kind == "all_gather"]


@settings(max_examples=60)
@given(st.sampled_from(["2", "3", "2x2"]), st.integers(0, 10**9), st.booleans(),
       st.sampled_from([None, 0, 64, 4096, 2**40]))
def test_steps_move_and_nothing_else_changes(mesh, seed, recompute, limit):
    program = two_layers(batch=4)
    mesh = parse_mesh(mesh)
    decisions = random_decisions(program, mesh, random.Random(seed), recompute)
    before = localise(program, decisions, (0,) * len(mesh.axes))
    after = check(prefetch_gathers(before, limit))
    assert sorted(map(id, before.steps)) == sorted(map(id, after.steps))
    others = [s for s in before.steps if s not in gathers(before)]
    for phase in ("forward", "backward"):  # what is no gathering keeps its order
        assert [s for s in after.steps if s not in gathers(after) and s.phase == phase] == [
            s for s in others if s.phase == phase]
    if limit == 0:
        assert [s for s in after.steps if s.phase == "forward"] == [s for s in before.steps if s.phase == "forward"]
    last = {tuple(r): prefetch_gathers(localise(program, decisions, r), limit)
            for r in (mesh.coordinates(rank) for rank in range(mesh.world_size))}
    assert len({structure(one) for one in last.values()}) == 1


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.sampled_from([64, 256, 1024]))
def test_no_more_than_the_limit_is_gathered_ahead(seed, limit):
    program = two_layers(batch=4)
    mesh = parse_mesh("2")
    before = remove_dead_steps(localise(program, random_decisions(program, mesh, random.Random(seed), False), (0,)))
    after = prefetch_gathers(before, limit)
    read = {(s.phase, v) for s in after.steps for v in s.reads}
    place = {id(s): i for i, s in enumerate(before.steps)}
    ahead: dict[int, CollectiveStep] = {}
    emitted = 0
    for step in after.steps:
        for value in step.reads:
            ahead.pop(value, None)
        if step in gathers(after):
            early = any(place[id(other)] < place[id(step)] for other in after.steps[emitted + 1:]
                        if isinstance(other, OpStep) and other.phase == step.phase)
            if (step.phase, step.outputs[0]) in read:
                ahead[step.outputs[0]] = step
            if early:
                assert sum(s.bytes for s in ahead.values()) <= limit
        emitted += 1
