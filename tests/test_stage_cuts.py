"""Stages are cut where something of their own begins: what every stage runs that reads it counts where it is read."""

import functools

import pytest

from fxpar.captured import capture_program
from fxpar.compile import compile_model
from fxpar.plans.program import node_inputs
from fxpar.plans.stages import FREE, cut_stages, free_nodes, stage_at
from fxpar.progress import silent
from fxpar.recompute import layer_of
from fxpar.stage_cuts import layer_starts, where_read
from tests.compiled import decoder_source

LAYERS = 8


@functools.cache
def captured(precision):
    return capture_program(decoder_source(layers=LAYERS, batch=4), outputs=("loss",), precision=precision,
                           progress=silent, microbatches=4)


@functools.cache
def compiled(precision, stages):
    return compile_model(decoder_source(layers=LAYERS, batch=4), mesh=f"pp={stages}", microbatches=4,
                         precision=precision, captured=captured(precision)).plan


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_every_stage_has_layers_of_its_own(precision, stages):
    # in bf16 casts of all parameters stand before the first layer: cuts among them would leave stages empty
    plan = compiled(precision, stages)
    program, cuts = plan.program, plan.decisions.pipeline.cuts
    free = free_nodes(program)
    assert not any(free[cut] for cut in cuts)
    home = cut_stages(program, stage_at(program, cuts), stages).stage_of
    layers = [{layer_of(node.module) for node, at in zip(program.nodes, home, strict=True)
               if at == stage and node.phase == "forward" and layer_of(node.module)} for stage in range(stages)]
    assert sorted(name for some in layers for name in some) == sorted(f"layers.{i}" for i in range(LAYERS))
    assert all(layers) or stages == 8  # of eight, one has what is outside of the layers


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_every_stage_runs_is_what_a_cut_leaves_free(precision):
    program = captured(precision)[0]
    last = max(n for n, node in enumerate(program.nodes) if node.phase == "forward")
    free = free_nodes(program)
    home = cut_stages(program, stage_at(program, (last,)), 2).stage_of
    forward = [n for n in range(last + 1) if program.nodes[n].phase == "forward"]
    assert [home[n] == FREE for n in forward] == [free[n] for n in forward]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_are_moved_and_none_is_lost(precision):
    program = captured(precision)[0]
    free = free_nodes(program)
    weights = [n % 7 + 1 if node.phase == "forward" else 0 for n, node in enumerate(program.nodes)]
    moved = where_read(program, free, weights)
    assert sum(moved) == sum(weights)
    read = {v for node in program.nodes if node.phase == "forward" for v in node_inputs(node)}
    for n, node in enumerate(program.nodes):
        if free[n] and any(v in read for v in node.outputs):
            assert moved[n] == 0
        elif not free[n]:
            assert moved[n] >= weights[n]
    starts = layer_starts(program, len(program.nodes) - 1, free)
    assert [layer_of(program.nodes[n].module) for n in starts] == [f"layers.{i}" for i in range(LAYERS)] + [None]


