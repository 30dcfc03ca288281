"""The reference interpreter on programs written by hand."""

import pytest
import torch

from fxpar.plans.program import Constant, Dtype, Input, Node, Output, Program, Ref, TensorType
from fxpar.runtime.interpret import constant_tensor, run_global

F32 = TensorType((2, 3), "float32")


def test_lists_keywords_dtypes_constants_and_unused_results():
    types = (
        TensorType((4, 3), "float32"),
        TensorType((2,), "int64"),
        TensorType((2, 3), "float32"),
        TensorType((2, 3), "float32"),
        TensorType((2,), "float64"),
        TensorType((2, 3), "float32"),
    )
    nodes = (
        Node("aten.split.Tensor", (Ref(0), 2, 0), (-1, 2), "forward"),
        Node("aten.add.Tensor", (Ref(2), 1, 2), (3,), "forward"),
        Node("aten._to_copy.default", (Ref(1), Dtype("float64"), None, None, None, None, None), (4,), "forward"),
        Node("aten.full.default", ((2, 3), 7.0, Dtype("float32"), None, None, None), (5,), "forward"),
    )
    data = torch.tensor([5, 6]).numpy().tobytes()
    program = Program(
        types,
        (Input(0, "input", "x"), Input(1, "constant", "0")),
        nodes,
        tuple(Output(value, "output", str(value)) for value in (0, 3, 4, 5)),
        constants=(Constant(types[1], data),),
    )
    x = torch.randn(4, 3)
    got = run_global(program, {0: x}, torch.device("cpu"))
    assert got[0] is x
    assert torch.equal(got[1], x[2:] + 2)
    assert torch.equal(got[2], torch.tensor([5.0, 6.0], dtype=torch.float64))
    assert torch.equal(got[3], torch.full((2, 3), 7.0))


def test_views_of_tensors_that_cannot_be_viewed():
    program = Program(
        (F32, TensorType((3, 2), "float32"), TensorType((6,), "float32")),
        (Input(0, "input", "x"),),
        (
            Node("aten.t.default", (Ref(0),), (1,), "forward"),
            Node("aten.view.default", (Ref(1), (6,)), (2,), "forward"),
        ),
        (Output(2, "output", "output"),),
    )
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(run_global(program, {0: x})[0], x.t().flatten())


def test_missing_input_is_a_key_error():
    program = Program((F32,), (Input(0, "input", "x"),), (), (Output(0, "output", "output"),))
    with pytest.raises(KeyError):
        run_global(program, {})


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "complex64", "int8"])
def test_constants_of_every_kind(dtype):
    tensor = torch.tensor([[1, 0], [0, 1]]).to(getattr(torch, dtype))
    data = tensor.flatten().view(torch.uint8).numpy().tobytes()
    assert torch.equal(constant_tensor(Constant(TensorType((2, 2), dtype), data)), tensor)
    assert constant_tensor(Constant(TensorType((0, 2), dtype), b"")).shape == (0, 2)
