"""What a program says must not depend on the process that runs it."""

import torch
from torch import nn

from fxpar.capture import capture
from fxpar.plans.program import Dtype, node_inputs
from fxpar.rules.factor_rule import argument_names


class Ramp(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 11)

    def forward(self, x):
        steps = torch.arange(0.0, 1.1, 0.1)[:11] + torch.zeros(11) + torch.arange(11)
        return (self.linear(x) * torch.linspace(0.1, 1, 11) * steps).sum()


def test_created_tensors_name_their_dtype():
    program = capture(Ramp(), (torch.randn(2, 3),), {})
    made = [n for n in program.nodes if not node_inputs(n)]
    assert made
    for node in made:
        named = dict(zip(argument_names(node.op), node.args, strict=True))
        assert named["dtype"] == Dtype(program.types[node.outputs[0]].dtype)
