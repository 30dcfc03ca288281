"""Prices: laws that every cluster's numbers obey, whatever they are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.plans.layout import REPLICATE, Partial, Shard, global_shape, local_shape, replicated
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.program import TensorType
from fxpar.plans.reshard import COLLECTIVES, reshard_steps
from fxpar.prices import step_bytes
from fxpar.rules.choices import joint_choices, site_of
from tests.compiled import decoder_program, prices
from tests.plans.draw import all_dims, layouts, mesh_of

torch.set_num_threads(1)
MESHES = ["2", "4", "2x2", "2x4"]
CLUSTERS = {"2": "1x2:h100", "4": "2x2:a100", "2x2": "2x2:h100", "2x4": "2x4:a10"}


@settings(max_examples=150)
@given(st.sampled_from(MESHES), all_dims(), st.data())
def test_a_reshard_costs_its_steps(mesh, dims, data):
    priced = prices(mesh, data.draw(st.sampled_from([None, CLUSTERS[mesh]])))
    a, b = (data.draw(layouts(dims, priced.mesh, pending=True)) for _ in range(2))
    kind = TensorType(global_shape(dims), "float32")
    chain = reshard_steps(a, b, dims, priced.mesh)
    assert priced.reshard_ns(a, b, dims, kind) == sum(priced.step_ns(s, dims, "float32") for s in chain)
    assert priced.reshard_ns(a, a, dims, kind) == 0
    for step in chain:
        time, size = priced.step_ns(step, dims, "float32"), step_bytes(step, dims, "float32", priced.mesh)
        assert time > 0 or step.kind == "alias"
        assert size == 2 * step_bytes(step, dims, "bfloat16", priced.mesh)
        if step.kind in COLLECTIVES:
            assert priced.step_ns(step, dims, "bfloat16") <= time
            assert time == priced.collective_ns(step.kind, step.axis, size)
    late = priced.gradient_ns(a, b, dims, kind)
    assert 0 <= late and (late == 0) == (priced.reshard_ns(a, b, dims, kind) == 0)


@given(all_dims(), st.lists(st.integers(1, 4), min_size=1, max_size=2), st.data())
def test_stored_bytes_are_those_of_the_largest_shard(dims, sizes, data):
    mesh = mesh_of(sizes)
    if mesh.world_size == 1 or math.prod(sizes) > 8:
        return
    priced = prices("x".join(map(str, sizes)))
    layout = data.draw(layouts(dims, mesh))
    largest = max(math.prod(local_shape(dims, layout, mesh, mesh.coordinates(r))) for r in range(mesh.world_size))
    assert priced.stored_bytes(layout, dims, "float32") == 4 * largest
    assert priced.stored_bytes(layout, dims, "bool") == largest


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_no_split_costs_more_than_the_whole(mesh):
    program = decoder_program()
    priced = prices(mesh, CLUSTERS[mesh])
    for site in {site_of(n, program) for n in program.nodes}:
        whole, *rest = (c for c in joint_choices(site, priced.mesh) if not c.expands)
        limit = priced.op_ns(site, whole)
        assert limit >= 0 and (limit == 0) == (limit == max(priced.op_ns(site, c) for c in (whole, *rest)) == 0)
        assert all(priced.op_ns(site, c) <= limit for c in rest), site.call.op


def test_a_bucket_is_cheaper_than_its_parts():
    """Many small gradients travel together; a large one pays for itself."""
    priced = prices("4", "1x4:h100")
    small, large = ((64,),), ((8192,), (8192,))
    pending, whole = (Partial("sum"),), replicated(parse_mesh("4"))
    kind = TensorType((64,), "float32")
    assert priced.gradient_ns(pending, whole, small, kind) * 10 < priced.reshard_ns(pending, whole, small, kind)
    kind = TensorType((8192, 8192), "float32")
    assert priced.gradient_ns(pending, whole, large, kind) == priced.reshard_ns(pending, whole, large, kind)


def test_views_and_hubs_are_free():
    program = decoder_program()
    priced = prices("2")
    for node in program.nodes:
        if node.op in ("fxpar.hub.default", "aten.t.default", "aten.view.default", "aten.transpose.int"):
            site = site_of(node, program)
            assert priced.op_ns(site, joint_choices(site, priced.mesh)[0]) == 0


def test_the_slower_axis_costs_more():
    priced = prices("2x2", "2x2:h100")
    dims, kind = ((4096,), (4096,)), TensorType((4096, 4096), "float32")
    between = priced.reshard_ns((Shard(0), REPLICATE), (REPLICATE, REPLICATE), dims, kind)
    within = priced.reshard_ns((REPLICATE, Shard(0)), (REPLICATE, REPLICATE), dims, kind)
    assert between > within


def test_small_gatherings_of_inputs_and_reductions_of_gradients_pay_a_share_of_a_bucket():
    """Stored in pieces, a bias costs next to nothing each way; what is not the first or the last step pays in full."""
    priced = prices("2x2", "2x2:h100")
    dims, kind = ((64,),), TensorType((64,), "float32")
    cut, whole = (REPLICATE, Shard(0)), (REPLICATE, REPLICATE)
    assert priced.input_ns(cut, whole, dims, kind) * 10 < priced.reshard_ns(cut, whole, dims, kind)
    pending = (REPLICATE, Partial("sum"))
    assert priced.gradient_ns(pending, cut, dims, kind) * 10 < priced.reshard_ns(pending, cut, dims, kind)
    # a reduction that something waits for is no bucket's
    both = (Partial("sum"), Shard(0))
    steps = reshard_steps(both, whole, dims, priced.mesh)
    assert [s.kind for s in steps] == ["all_reduce", "all_gather"]
    assert priced.gradient_ns(both, whole, dims, kind) == priced.reshard_ns(both, whole, dims, kind)
