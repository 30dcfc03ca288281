"""Recomputation by rule: which nodes run again."""

import pytest
import torch

from fxpar.plans.program import node_inputs
from fxpar.recompute import LEVELS, layer_of, recompute_nodes
from fxpar.rules.ops.hub import HUB
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
        assert not set(node.outputs) & {o.value for o in program.outputs} or node.op == HUB
    assert not any(program.nodes[i].op in ("aten.addmm.default", "fxpar.attention.default") for i in cheap)
    border = {v for n in program.nodes if n.phase == "forward" for v in node_inputs(n)
              for p in program.nodes if v in p.outputs and layer_of(p.module) != layer_of(n.module)}
    assert border and not any(border & set(program.nodes[i].outputs) for i in layers if program.nodes[i].op != HUB)
    assert recompute_nodes(mlp_program(), "layers") == () or mlp_program().nodes[0].module
