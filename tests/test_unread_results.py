"""Ops split in several steps of whose results only some are read."""

import msgspec
import pytest
import torch
from torch import nn

from fxpar.compile import compile_model
from fxpar.model_source import OPTIMIZERS, ModelSource, default_loss
from fxpar.plans.mesh import parse_mesh
from fxpar.verify import verify_plan
from tests.test_split_rows import in_steps

torch.set_num_threads(1)


class Picks(nn.Module):
    """The places of maxima without their values, values without places, and neither mean nor deviation of a norm."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 6)

    def forward(self, x):
        h = self.enter(x)
        places, least = h.max(1, keepdim=True).indices, h.min(1).values
        return h.gather(1, places).square().sum() + least.sum() + nn.functional.layer_norm(h, (6,)).abs().sum()


def inputs():
    return (torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0)),), {}


@pytest.mark.parametrize("mesh", ["2", "2x2"])
@pytest.mark.parametrize("seed", range(3))
def test_plan_that_splits_in_steps_equals_eager(mesh, seed):
    source = ModelSource("picks", lambda: Picks().train(), inputs, default_loss, OPTIMIZERS["adamw"])
    made = compile_model(source, mesh=mesh, random_choices=0).plan
    decisions, ops = in_steps(made.program, parse_mesh(mesh), seed)
    assert "aten.max.dim" in ops
    report = verify_plan(msgspec.structs.replace(made, decisions=decisions), source, dtype="f64")
    assert report.ok, report.text()
