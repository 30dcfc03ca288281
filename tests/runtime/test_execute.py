"""Generated code on real gloo ranks gives what the virtual mesh gives, to the bit where sums are of two."""

import random

import pytest
import torch
from torch.distributed.tensor import DTensor

from fxpar.plans.mesh import parse_mesh
from fxpar.runtime.execute import build
from fxpar.runtime.groups import connect
from fxpar.runtime.interpret import run_global
from fxpar.runtime.pieces import scatter
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.runtime.surface import torch_placements
from fxpar.runtime.virtual import run_virtual
from tests.runtime.ranks import run_ranks, values
from tests.runtime.small_programs import global_inputs, random_decisions, random_layout, two_layers


def drawn(mesh, seed):
    compound = seed % 2 == 0
    batch = 3 + seed % 4
    program = two_layers(batch=batch * 4 if compound else batch, atoms=(batch, 4) if compound else None)
    return program, random_decisions(program, parse_mesh(mesh), random.Random(seed), recompute=seed % 3 == 0)


def run_drawn(rank, mesh, seeds):
    result = []
    for seed in seeds:
        program, decisions = drawn(mesh, seed)
        groups = connect(decisions.mesh)
        executable = build(program, rewrite(program, decisions, groups.coords), groups)
        inputs = global_inputs(program, seed)
        local = {
            e.value: scatter(inputs[e.value], program.dims[e.value], lay, decisions.mesh, groups.coords)
            for e, lay in zip(program.inputs, decisions.inputs, strict=True)
        }
        halves = executable.halves
        row = [local[program.inputs[i].value] for i in halves.forward_inputs]
        returned = executable.forward(row)
        assert row == []
        count = len(halves.kept_outputs)
        tangent = [local[e.value] for e in program.inputs if e.kind == "tangent"]
        late = executable.backward([*returned[count:], *tangent])
        outputs = dict(zip((*halves.kept_outputs, *halves.late_outputs), (*returned[:count], *late), strict=True))
        result.append([outputs[i] for i in range(len(program.outputs))])
    return result


@pytest.mark.parametrize(("mesh", "world"), [("2", 2), ("2x2", 4)])
def test_gloo_ranks_equal_the_virtual_mesh(mesh, world):
    seeds = list(range(12))
    found = values(run_ranks(run_drawn, world, mesh, seeds))
    for position, seed in enumerate(seeds):
        program, decisions = drawn(mesh, seed)
        inputs = global_inputs(program, seed)
        virtual = run_virtual(program, decisions, inputs)
        for index, want in enumerate(run_global(program, inputs)):
            torch.testing.assert_close(virtual.outputs[index], want, rtol=1e-10, atol=1e-10)
            for rank in range(world):
                torch.testing.assert_close(
                    found[rank][position][index], virtual.pieces[index][rank], rtol=1e-12, atol=1e-12
                )


DIMS = [((8, 3), (4,)), ((5,), (6, 2)), ((2, 6, 3),), ((7,),), ((4, 4, 4), (3,))]


def gather_layouts(rank, mesh):
    groups = connect(parse_mesh(mesh))
    rng = random.Random(0)
    worst = 0.0
    sayable = 0
    for dims in DIMS * 6:
        layout = random_layout(dims, groups.mesh, rng)
        placements = torch_placements(layout, dims, groups.mesh)
        if placements is None:
            continue
        sayable += 1
        shape = tuple(torch.Size([torch.tensor(a).prod().item() for a in dims]))
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        local = scatter(whole, dims, layout, groups.mesh, groups.coords).contiguous()
        strides = whole.stride()
        got = DTensor.from_local(local, groups.device_mesh, placements, shape=whole.shape, stride=strides).full_tensor()
        if not torch.equal(got, whole):
            worst = max(worst, 1.0)
            print(layout, placements)
    return worst, sayable


def test_torch_gathers_stored_layouts_to_the_same_tensor():
    for worst, sayable in values(run_ranks(gather_layouts, 4, "2x2")):
        assert worst == 0.0 and sayable > 12
