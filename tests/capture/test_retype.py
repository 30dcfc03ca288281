"""Programs in other dtypes."""

import struct

import pytest
import torch

from fxpar.capture.retype import ALL_DOUBLE, DOUBLE, retype
from fxpar.plans.program import Constant, Dtype, Node, Program, Ref, TensorType


def program(constant):
    node = Node("aten._to_copy.default", (Ref(0), Dtype("float32"), (Dtype("int64"),)), (1,), "forward")
    return Program((TensorType((2,), "float32"), TensorType((2,), "complex64")), (), (node,), (), constants=(constant,))


def test_types_arguments_and_constants():
    constant = Constant(TensorType((2,), "float32"), struct.pack("<2f", 0.5, -3.0))
    done = retype(program(constant), {"float32": "float64"})
    assert [kind.dtype for kind in done.types] == ["float64", "complex128"]
    assert done.nodes[0].args[1:] == (Dtype("float64"), (Dtype("int64"),))
    assert done.constants[0] == Constant(TensorType((2,), "float64"), struct.pack("<2d", 0.5, -3.0))
    assert retype(done, {new: old for old, new in DOUBLE.items()}) == program(constant)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_constants_widen(dtype):
    values = torch.tensor([0.5, -3.0, 1e-3, 65504.0], dtype=getattr(torch, dtype))
    constant = Constant(TensorType((4,), dtype), values.view(torch.uint8).numpy().tobytes())
    done = retype(program(constant), ALL_DOUBLE).constants[0]
    assert done.type.dtype == "float64" and done.data == values.double().numpy().tobytes()


@pytest.mark.parametrize(("old", "new"), [("float32", "bfloat16"), ("float32", "complex64"), ("int64", "float32")])
def test_other_conversions_are_refused(old, new):
    with pytest.raises(ValueError, match=new):
        retype(program(Constant(TensorType((1,), old), b"\0" * 8)), {old: new})
