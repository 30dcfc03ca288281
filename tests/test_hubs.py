"""Hubs: one per value and phase with several readers, and the program computes the same."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.hubs import insert_hubs, shared_values
from fxpar.plans.program import Program, Ref, node_inputs
from fxpar.rules.factor_rule import torch_op
from fxpar.rules.ops.hub import HUB
from tests.program_builder import ProgramBuilder

torch.set_num_threads(1)


def run(program: Program) -> list[torch.Tensor]:
    """Outputs on inputs drawn from their names."""
    env: dict[int, torch.Tensor] = {}
    for entry in program.inputs:
        generator = torch.Generator().manual_seed(sum(map(ord, entry.name)))
        env[entry.value] = torch.randn(program.types[entry.value].shape, generator=generator, dtype=torch.float64)
    for node in program.nodes:
        args = [env[a.id] if isinstance(a, Ref) else a for a in node.args]
        arguments = torch_op(node.op)._schema.arguments
        positional = [v for v, a in zip(args, arguments, strict=True) if not a.kwarg_only]
        env[node.outputs[0]] = torch_op(node.op)(
            *positional, **{a.name: v for v, a in zip(args, arguments, strict=True) if a.kwarg_only}
        )
    return [env[o.value] for o in program.outputs]


def check_order(program: Program) -> None:
    """Every value is defined once, in number order per node list, before it is read."""
    defined = {i.value for i in program.inputs}
    last = max(defined)
    for node in program.nodes:
        assert set(node_inputs(node)) <= defined
        for value in node.outputs:
            assert value > last
            last = value
            defined.add(value)
    assert defined == set(range(len(program.types)))
    assert {o.value for o in program.outputs} <= defined


@st.composite
def programs(draw):
    b = ProgramBuilder()
    values = [b.enter("x", (3, 3)), b.parameter("w", (3, 3))]
    count = draw(st.integers(1, 12))
    turn = draw(st.integers(0, count))
    for i in range(count):
        b.phase = "forward" if i < turn else "backward"
        left, right = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        values.append(b.call(draw(st.sampled_from(["mm", "add.Tensor", "sub.Tensor"])), left, right))
    for ref in draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)):
        b.leave(ref, "output")
    return b.done()


@given(programs())
def test_same_results_and_every_shared_value_has_one_hub(program: Program):
    hubbed = insert_hubs(program)
    check_order(hubbed)
    for a, b in zip(run(program), run(hubbed), strict=True):
        assert torch.equal(a, b)
    assert shared_values(hubbed) == {}
    assert sum(n.op == HUB for n in hubbed.nodes) == len(shared_values(program))
    assert insert_hubs(hubbed) == hubbed


def test_phases_have_their_own_hub_right_before_the_first_reader():
    b = ProgramBuilder()
    x, w = b.enter("x", (2, 4)), b.parameter("w", (4, 4))
    h = b.call("mm", x, w)
    u = b.call("mm", h, w)
    b.leave(u, "loss")
    b.phase = "backward"
    g = b.call("mm", u, w)
    b.leave(b.call("mm", g, w), "gradient", "x")
    program = insert_hubs(b.done())
    assert [(n.op, n.phase) for n in program.nodes] == [
        (HUB, "forward"),
        ("aten.mm.default", "forward"),
        ("aten.mm.default", "forward"),
        (HUB, "backward"),
        ("aten.mm.default", "backward"),
        ("aten.mm.default", "backward"),
    ]
    # w has a hub in each phase, both reading w itself; u is read once in the backward: no hub
    assert [node_inputs(n) for n in program.nodes if n.op == HUB] == [(1,), (1,)]


def test_the_hub_is_a_view_under_autograd():
    x = torch.randn(3, requires_grad=True)
    y = torch.ops.fxpar.hub(x)
    assert y.data_ptr() == x.data_ptr()
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
