"""Recomputation: which nodes, and what is then kept: as the rewritten program keeps it."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.formulate import _view_test
from fxpar.layers import tie_layers
from fxpar.plans.layout import replicated
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, node_inputs
from fxpar.recompute import LEVELS, layer_of, recompute_nodes, saved_values
from fxpar.runtime.local import OpStep
from fxpar.runtime.rewrite.partition import partition
from fxpar.runtime.rewrite.passes import rewrite
from tests.compiled import decoder_program, mlp_program

torch.set_num_threads(1)


@pytest.mark.parametrize(("module", "layer"), [
    ("model.layers.3.mlp.up", "model.layers.3"), ("layers.0", "layers.0"), ("3", "3"), ("head", None), ("", None),
    ("h.1.attn.2", "h.1"), ("conv2.x", None), ("layer1.0.conv", "layer1.0"),
])
def test_layers_end_at_the_first_number(module, layer):
    assert layer_of(module) == layer


def test_levels_are_nested_and_inside_layers():
    program = decoder_program()
    none, cheap, layers = (frozenset(recompute_nodes(program, level)) for level in LEVELS)
    assert none == frozenset() and none < cheap < layers
    for index in layers:
        node = program.nodes[index]
        assert node.phase == "forward" and layer_of(node.module)
        assert not set(node.outputs) & {o.value for o in program.outputs}
    assert not any(program.nodes[i].op in ("aten.addmm.default", "fxpar.attention.default") for i in cheap)
    border = {v for n in program.nodes if n.phase == "forward" for v in node_inputs(n)
              for p in program.nodes if v in p.outputs and layer_of(p.module) != layer_of(n.module)}
    assert border and not any(border & set(program.nodes[i].outputs) for i in layers)
    assert recompute_nodes(mlp_program(), "layers") == () or mlp_program().nodes[0].module


def crossing(program: Program, recompute: tuple[int, ...]) -> tuple[set[int], set[int]]:
    """(values that the rewritten forward keeps for backward, nodes that run again), with everything replicated."""
    mesh = parse_mesh("1")
    whole = replicated(mesh)
    decisions = Decisions(mesh, ((".",),) * len(program.nodes), (whole,) * len(program.inputs),
                          (whole,) * len(program.outputs), recompute)
    local = rewrite(program, decisions, (0,))
    inputs = {i.value for i in program.inputs}
    kept = {local.origins[v][0] for v in partition(program, local).saved} - inputs
    return kept, {s.node for s in local.steps if isinstance(s, OpStep) and s.recomputed}


@settings(max_examples=20)
@given(st.sampled_from(["none", "cheap", "layers", "drawn"]), st.integers(0, 10**6))
def test_what_is_saved_is_what_the_rewritten_program_keeps(level, seed):
    """Seen through views: a kept view keeps what it looks at."""
    program = decoder_program()
    if level == "drawn":
        draw = torch.rand(len(program.nodes), generator=torch.Generator().manual_seed(seed))
        recompute = tuple(i for i, n in enumerate(program.nodes) if n.phase == "forward" and draw[i] < 0.4)
    else:
        recompute = recompute_nodes(program, level)
    is_view = _view_test(tie_layers(program), parse_mesh("1"))
    saved = saved_values(program, recompute, is_view)
    producer = {v: i for i, n in enumerate(program.nodes) for v in n.outputs if v >= 0}

    def looked_at(value: int) -> int:
        while value in producer and is_view(producer[value]):  # a view in forward
            value = node_inputs(program.nodes[producer[value]])[0]
        return value

    kept, again = crossing(program, recompute)
    inputs = {i.value for i in program.inputs}
    assert {looked_at(v) for v in kept} - inputs <= set(saved.values)
    views = {i for i in saved.again if is_view(i)}
    assert set(saved.again) >= again - {i for i in again if is_view(i)}
    if level != "drawn":
        assert {looked_at(v) for v in kept} - inputs == {looked_at(v) for v in saved.values} - inputs
        assert set(saved.again) - views == {i for i in again if not is_view(i)}


def test_nothing_is_saved_without_a_backward():
    program = decoder_program()
    forward = msgspec.structs.replace(program, nodes=tuple(n for n in program.nodes if n.phase == "forward"))
    saved = saved_values(forward, recompute_nodes(program, "layers"), lambda n: False)
    assert saved.values == () and saved.again == ()
