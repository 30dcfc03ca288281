"""Torch's placements of a stored layout cut a tensor into the very blocks that the plan means."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from fxpar.plans.layout import PARTIAL_SUM, Dims, Layout, Replicate, Shard, global_shape
from fxpar.plans.mesh import Mesh, parse_mesh
from fxpar.runtime.pieces import scatter
from fxpar.runtime.surface import torch_placements
from tests.plans.draw import all_dims, layouts, meshes

torch.set_num_threads(1)


def torch_local(tensor: torch.Tensor, placements: tuple, mesh: Mesh, coords: tuple[int, ...]) -> torch.Tensor:
    """What DTensor keeps of a global tensor at ``coords``: its own splits, one mesh dim after the other."""
    for placement, ranks, coord in zip(placements, mesh.sizes, coords, strict=True):
        if not placement.is_replicate():
            pieces, _ = placement._split_tensor(tensor, ranks, with_padding=False, contiguous=False)
            tensor = pieces[coord]
    return tensor


@settings(max_examples=300)
@given(meshes(), all_dims(), st.data())
def test_every_rank_holds_the_same(mesh: Mesh, dims: Dims, data):
    layout = data.draw(layouts(dims, mesh))
    placements = torch_placements(layout, dims, mesh)
    if placements is None:
        return
    shape = global_shape(dims)
    whole = torch.arange(int(torch.Size(shape).numel())).reshape(shape)
    for rank in range(mesh.world_size):
        coords = mesh.coordinates(rank)
        assert torch.equal(
            torch_local(whole, placements, mesh, coords), scatter(whole, dims, layout, mesh, coords)
        ), (layout, placements)


@given(meshes(), all_dims(), st.data())
def test_cuts_of_whole_dims_can_always_be_said(mesh: Mesh, dims: Dims, data):
    """Every dim one run, however uneven and nested: plain torch shards."""
    options = [Replicate(), *(Shard(d, 0, len(atoms)) for d, atoms in enumerate(dims) if atoms)]
    layout: Layout = tuple(data.draw(st.sampled_from(options)) for _ in mesh.axes)
    want = tuple(TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate() for p in layout)
    assert torch_placements(layout, dims, mesh) == want


@pytest.mark.parametrize(("layout", "want"), [
    ((Shard(0), Replicate()), (TorchShard(0), TorchReplicate())),
    ((Shard(0, 1), Replicate()), (_StridedShard(0, split_factor=4), TorchReplicate())),
    ((Shard(0), Shard(0, 1)), (TorchShard(0), _StridedShard(0, split_factor=2))),
    ((Shard(0), Shard(1)), (TorchShard(0), TorchShard(1))),
    ((Shard(0), Shard(0)), (TorchShard(0), TorchShard(0))),
    ((Shard(0, 1), Shard(0)), None),
    ((PARTIAL_SUM, Replicate()), None),
])
def test_by_name(layout, want):
    assert torch_placements(layout, ((4, 6), (8,)), parse_mesh("2x2")) == want


def test_an_uneven_cut_of_a_part_of_a_dim_cannot_be_said():
    for layout in [(Shard(0),), (Shard(0, 1),)]:
        assert torch_placements(layout, ((5, 6),), parse_mesh("4")) is None
    assert torch_placements((Shard(0, 0, 2),), ((5, 6),), parse_mesh("4")) == (TorchShard(0),)
