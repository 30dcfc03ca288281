"""What the names of axes ask for, seen in the plans; names that this version does not do."""


import msgspec
import pytest
import torch
from torch import nn

from fxpar.compile import compile_model
from fxpar.model_source import ModelSource
from fxpar.plans.errors import FxparError, UnsupportedError
from fxpar.plans.layout import Replicate, Shard
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Plan
from fxpar.restrict import Restriction, check_axis_names, roles_of, weight_operands, weight_values
from fxpar.rules.choices import choice_by_names, joint_choices, site_of
from tests.compiled import decoder_plan, decoder_program, mlp_program

torch.set_num_threads(1)
PRODUCTS = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "fxpar.attention.default"}


def forward_products(plan: Plan):
    """(node, its choice) of every matmul and attention of the forward."""
    for node, names in zip(plan.program.nodes, plan.decisions.choices, strict=True):
        if node.phase == "forward" and node.op in PRODUCTS:
            yield node, choice_by_names(site_of(node, plan.program), names, plan.decisions.mesh)


@pytest.mark.parametrize(("mesh", "axis"), [("dp=2", 0), ("dp=2,tp=2", 0), ("tp=2,dp=2", 1)])
def test_dp_splits_the_batch_of_every_product(mesh, axis):
    plan = decoder_plan(mesh)
    found = list(forward_products(plan))
    assert len(found) == 11
    for node, choice in found:
        placement = choice.outputs[0][axis]
        assert isinstance(placement, Shard) and (placement.dim, placement.first) == (0, 0), node.op
        assert plan.program.dims[node.outputs[0]][0][0] == 8  # the batch is the outer atom of the rows
    for item, layout in zip(plan.program.inputs, plan.decisions.inputs, strict=True):
        if item.kind == "parameter":
            assert layout[axis] == Replicate(), item.name
        if item.kind == "input":
            assert layout[axis] == Shard(0)


@pytest.mark.parametrize(("mesh", "axis"), [("tp=2", 0), ("dp=2,tp=2", 1), ("tp=2,dp=2", 0)])
def test_tp_splits_every_weight_and_never_the_batch(mesh, axis):
    plan = decoder_plan(mesh)
    program = plan.program
    weights = weight_operands(program)
    assert len(weights) == 9
    for index, operands in weights.items():
        names = plan.decisions.choices[index]
        choice = choice_by_names(site_of(program.nodes[index], program), names, plan.decisions.mesh)
        assert any(isinstance(choice.inputs[o][axis], Shard) for o in operands), program.nodes[index]
    for item, layout in zip(program.inputs, plan.decisions.inputs, strict=True):
        if item.kind == "parameter" and item.value in weight_values(program, weights):
            assert isinstance(layout[axis], Shard), item.name
        if item.kind == "input":
            assert layout[axis] == Replicate()
    for node, choice in forward_products(plan):
        assert choice.outputs[0][axis] != Shard(0), node


def test_parameters_in_pieces_are_cast_in_pieces():
    """In bfloat16 half as much is gathered: a dp axis that stores parameters cut may also cut casts of them."""
    program = decoder_program("bf16")
    mesh = parse_mesh("dp=2")
    casts = [n for n, node in enumerate(program.nodes) if node.op == "aten._to_copy.default"
             and node.args[0].id in {i.value for i in program.inputs if i.kind == "parameter"}]
    assert casts
    for sharded, cut in ((True, True), (None, True), (False, False)):
        restriction = Restriction(program, ("dp",), lambda *_: False, lambda *_: False, {}, frozenset(), sharded)
        for index in casts:
            site = site_of(program.nodes[index], program)
            offered = restriction.nodes(index, site, joint_choices(site, mesh))
            assert any(isinstance(c.inputs[0][0], Shard) for c in offered) == cut


def test_weights_are_found_through_views_and_casts():
    for precision in ("fp32", "bf16"):
        program = decoder_program(precision=precision)
        values = weight_values(program, weight_operands(program))
        names = {i.name for i in program.inputs if i.value in values}
        assert names == {f"layers.{k}.{n}.weight" for k in (0, 1) for n in ("qkv", "out", "up", "down")} | {
            "head.weight"
        }


def test_weights_of_convolutions_count():
    def build():
        return nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.Flatten())

    source = ModelSource("cnn", build, lambda: ((torch.randn(4, 4, 8, 8),), {}), lambda o, _: o.square().mean(),
                         torch.optim.SGD, batch_dim=0)
    plan = compile_model(source, mesh="tp=2").plan
    stored = {i.name: lay for i, lay in zip(plan.program.inputs, plan.decisions.inputs, strict=True)}
    assert isinstance(stored["0.weight"][0], Shard) and isinstance(stored["2.weight"][0], Shard)


def test_a_weight_that_nothing_can_split_is_left_whole():
    """3 hidden features on 2 ranks can be cut unevenly; one cannot."""
    source = ModelSource("narrow", lambda: nn.Linear(1, 1), lambda: ((torch.randn(4, 1),), {}),
                         lambda o, _: o.square().mean(), torch.optim.SGD, batch_dim=0)
    plan = compile_model(source, mesh="tp=2").plan
    assert {lay for i, lay in zip(plan.program.inputs, plan.decisions.inputs, strict=True)} == {(Replicate(),)}


@pytest.mark.parametrize("name", ["ep", "cp"])
def test_axes_of_later_versions_are_refused(name):
    with pytest.raises(UnsupportedError, match=f"{name}=2"):
        check_axis_names(parse_mesh(f"{name}=2"))
    check_axis_names(parse_mesh(f"{name}=1"))


@pytest.mark.parametrize("mesh", ["xp=2", "dp=2,fsdp=2", "a=2", "ax=2", "TP=2", "dp1=2"])
def test_unknown_names_are_refused(mesh):
    with pytest.raises(FxparError, match="is not known"):
        check_axis_names(parse_mesh(mesh))


def test_known_names():
    for mesh in ("dp=2", "tp=2", "dp=2,tp=2", "2x2", "pp=1,dp=2", "a3=2"):
        check_axis_names(parse_mesh(mesh))
    assert roles_of(parse_mesh("dp=2,tp=2")) == ("dp", "tp")
    assert roles_of(parse_mesh("2x2")) == ("", "")


def test_a_model_without_products_has_no_weights():
    program = mlp_program()
    nodes = tuple(n for n in program.nodes if n.op not in PRODUCTS)
    bare = msgspec.structs.replace(program, nodes=nodes)
    assert weight_operands(bare) == {} and weight_values(bare, {}) == frozenset()
