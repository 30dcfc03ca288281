"""Whole models in which every op that can be split in several steps is: rows through norms and softmax, keys of
causal attention, image rows through convolutions, on virtual and on real ranks."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from fxpar.compile import compile_model
from fxpar.formulate import output_layouts
from fxpar.model_source import ModelSource, load_model_source
from fxpar.plans.layout import Layout
from fxpar.plans.mesh import Mesh, parse_mesh
from fxpar.plans.plan import Decisions, Plan
from fxpar.plans.program import Program, node_inputs
from fxpar.rules.choices import choice_by_names, joint_choices, site_of
from fxpar.runtime.local import CollectiveStep
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.simulate import local_step_ns
from fxpar.stored import stored_layouts
from fxpar.verify import verify_plan
from tests.compiled import prices

torch.set_num_threads(1)
MODELS = Path(__file__).parent / "models"


@cache
def source(name: str) -> ModelSource:
    return load_model_source(str(MODELS / f"{name}.py"))


@cache
def plain(name: str, mesh: str) -> Plan:
    return compile_model(source(name), mesh=mesh, random_choices=0).plan


def in_steps(program: Program, mesh: Mesh, seed: int) -> tuple[Decisions, set[str]]:
    """Drawn decisions that split in steps wherever an op can; and the ops that are."""
    draw = random.Random(seed)
    choices, ops = [], set()
    for node in program.nodes:
        offered = joint_choices(site_of(node, program), mesh)
        most = max(sum(map(bool, c.expands)) for c in offered)
        chosen = draw.choice([c for c in offered if sum(map(bool, c.expands)) == most])
        choices.append(chosen.names)
        ops |= {node.op} if chosen.expands else set()
    inputs = tuple(draw.choice(stored_layouts(i, program.dims[i.value], mesh)) for i in program.inputs)
    return Decisions(mesh, tuple(choices), inputs, output_layouts(program, inputs, mesh)), ops


def split_plan(name: str, mesh: str, seed: int) -> tuple[Plan, set[str]]:
    made = plain(name, mesh)
    decisions, ops = in_steps(made.program, parse_mesh(mesh), seed)
    return msgspec.structs.replace(made, decisions=decisions), ops


SPLIT = {
    "causal": {
        "fxpar.attention.default", "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default",
    },
    "normed": {
        "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default", "aten._softmax.default",
        "aten._softmax_backward_data.default", "aten.cumsum.default", "aten.argmax.default", "aten.max.dim",
        "aten.logsumexp.default", "aten.linalg_vector_norm.default",
    },
    "image_rows": {
        "aten.convolution.default", "aten.convolution_backward.default", "aten.max_pool2d_with_indices.default",
        "aten.max_pool2d_with_indices_backward.default", "aten.avg_pool2d.default", "aten.avg_pool2d_backward.default",
    },
}  # fmt: skip


@pytest.mark.parametrize("mesh", ["2", "3", "2x2"])
@pytest.mark.parametrize("name", SPLIT)
def test_virtual_ranks_reproduce_one_device(name: str, mesh: str) -> None:
    for seed in range(2):
        plan, ops = split_plan(name, mesh, seed)
        assert ops == SPLIT[name]
        report = verify_plan(plan, source(name))
        assert report.ok, report.text()


@pytest.mark.parametrize("name", SPLIT)
def test_real_ranks_reproduce_one_device(name: str) -> None:
    plan, _ = split_plan(name, "2", 5)
    report = verify_plan(plan, source(name), ranks="gloo")
    assert report.ok, report.text()


def test_rows_of_images_travel_between_neighbours_only() -> None:
    plan, _ = split_plan("image_rows", "4", 1)
    local = rewrite(plan.program, plan.decisions, (1,))
    kinds = [s.kind for s in local.steps if isinstance(s, CollectiveStep)]
    assert "halo" in kinds and "halo_sum" in kinds


@pytest.mark.parametrize("mesh", ["2", "2x2"])
@pytest.mark.parametrize("name", SPLIT)
def test_steps_cost_what_the_rewritten_program_takes(name: str, mesh: str) -> None:
    """Before bucketing: prices of nodes and of reshards (each once) are the times of all steps of rank 0."""
    plan, _ = split_plan(name, mesh, 3)
    program, decisions, priced = plan.program, plan.decisions, prices(mesh)
    local = localise(program, decisions, (0,) * len(decisions.mesh.axes))
    taken = sum(
        priced.collective_ns(s.kind, s.axis, s.bytes) if isinstance(s, CollectiveStep)
        else local_step_ns(s, local, priced)
        for s in local.steps
    )
    made = {i.value: lay for i, lay in zip(program.inputs, decisions.inputs, strict=True)}
    wanted: dict[tuple[int, Layout, str], int] = {}
    said = 0
    for node, names in zip(program.nodes, decisions.choices, strict=True):
        site = site_of(node, program)
        choice = choice_by_names(site, names, decisions.mesh)
        assert choice is not None
        said += priced.op_ns(site, choice)
        for value, want in zip(node_inputs(node), choice.inputs, strict=True):
            wanted[value, want, node.phase] = priced.reshard_ns(
                made[value], want, program.dims[value], program.types[value]
            )
        made.update((v, lay) for v, lay in zip(node.outputs, choice.outputs, strict=True) if v >= 0)
    phase = {v: node.phase for node in program.nodes for v in node.outputs}
    for output, want in zip(program.outputs, decisions.outputs, strict=True):
        value = output.value
        when = "backward" if output.kind == "gradient" else phase.get(value, "forward")
        wanted[value, want, when] = priced.reshard_ns(made[value], want, program.dims[value], program.types[value])
    assert taken == said + sum(wanted.values())
