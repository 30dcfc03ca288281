"""Rewrites of small programs, before -> after."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.capture.numbering import renumber
from fxpar.capture.simplify import simplify
from fxpar.plans.program import Dtype, Input, Node, Output, Program, Ref, TensorType
from fxpar.runtime.interpret import call, run_global

F32 = "float32"


def chain(shape, *steps, dtype=F32):
    """A program of one input and unary steps (op, args after the operand, shape, dtype)."""
    types, nodes = [TensorType(shape, dtype)], []
    for op, args, result, kind in steps:
        types.append(TensorType(result, kind))
        nodes.append(Node(op, (Ref(len(types) - 2), *args), (len(types) - 1,), "forward"))
    return Program(
        tuple(types),
        (Input(0, "input", "x"),),
        tuple(nodes),
        (Output(len(types) - 1, "output", "output"),),
    )


def ops(program):
    return [node.op for node in program.nodes]


def test_aliases_vanish():
    program = chain(
        (2, 3),
        ("aten.detach.default", (), (2, 3), F32),
        ("aten.clone.default", (None,), (2, 3), F32),
        ("aten.t.default", (), (3, 2), F32),
        ("aten.t.default", (), (2, 3), F32),
        ("aten.slice.Tensor", (0, 0, 1 << 62, 1), (2, 3), F32),
        ("aten.mul.Tensor", (1.0,), (2, 3), F32),
        ("aten.view.default", ((2, -1),), (2, 3), F32),
        ("aten._to_copy.default", (Dtype(F32),) + (None,) * 5, (2, 3), F32),
    )
    done = simplify(program)
    assert not done.nodes and done.outputs[0].value == 0


def test_what_changes_values_stays():
    program = chain(
        (2, 3),
        ("aten.slice.Tensor", (0, 1, 1 << 62, 1), (1, 3), F32),
        ("aten._unsafe_view.default", ((-1,),), (3,), F32),
        ("aten._to_copy.default", (Dtype("float64"),) + (None,) * 5, (3,), "float64"),
        ("aten.mul.Tensor", (True,), (3,), "float64"),
        ("aten.add.Tensor", (0.0, 1), (3,), "float64"),
    )
    done = simplify(program)
    assert ops(done) == [
        "aten.slice.Tensor",
        "aten.view.default",
        "aten._to_copy.default",
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]
    assert done.nodes[1].args == (Ref(1), (3,))


def test_fills_and_copies():
    program = chain(
        (2,),
        ("aten.new_zeros.default", ((3,), None, None, None, None), (3,), "bool"),
        ("aten.full_like.default", (2.5, None, None, None, None, None), (3,), F32),
    )
    assert [node.args[:3] for node in simplify(program).nodes] == [((3,), 2.5, Dtype(F32))]
    types = (TensorType((2,), F32), TensorType((), F32), TensorType((2,), F32))
    copy = Node("aten.copy.default", (Ref(0), Ref(1), False), (2,), "forward")
    inputs = (Input(0, "input", "x"), Input(1, "input", "y"))
    done = simplify(Program(types, inputs, (copy,), (Output(2, "output", "output"),)))
    assert done.nodes[0].op == "aten.expand.default" and done.nodes[0].args == (Ref(1), (2,), False)


def test_equal_calls_are_shared_within_a_phase_only():
    kind = TensorType((2,), F32)
    nodes = tuple(
        Node("aten.mul.Tensor", (Ref(0), number), (index + 1,), phase)
        for index, (number, phase) in enumerate([(2, "forward"), (2, "forward"), (2.0, "forward"), (2, "backward")])
    )
    outputs = tuple(Output(value, "output", str(value)) for value in range(1, 5))
    done = simplify(Program((kind,) * 5, (Input(0, "input", "x"),), nodes, outputs))
    assert [output.value for output in done.outputs] == [1, 1, 3, 4]


STEPS = st.sampled_from(
    [
        ("aten.t.default", ()),
        ("aten.transpose.int", (0, 1)),
        ("aten.transpose.int", (-1, -1)),
        ("aten.detach.default", ()),
        ("aten.neg.default", ()),
        ("aten.mul.Tensor", (1,)),
        ("aten.mul.Tensor", (3,)),
        ("aten.add.Tensor", (0, 1)),
        ("aten.pow.Tensor_Scalar", (1.0,)),
        ("aten.slice.Tensor", (0, 0, 99, 1)),
        ("aten.slice.Tensor", (1, None, -1, 1)),
        ("aten.slice.Tensor", (0, 0, 99, 2)),
    ]
)


@given(st.lists(STEPS, max_size=8), st.sampled_from(["float32", "int64"]))
def test_values_are_kept(steps, dtype):
    x = torch.arange(1, 31).reshape(5, 6).to(getattr(torch, dtype))
    described, value = [], x
    for op, args in steps:
        value = call(op, [value, *args], None)
        described.append((op, args, tuple(value.shape), str(value.dtype).removeprefix("torch.")))
    program = chain((5, 6), *described, dtype=dtype)
    done = renumber(simplify(program))
    assert len(done.nodes) <= len(program.nodes)
    assert torch.equal(run_global(done, {0: x})[0], value)
