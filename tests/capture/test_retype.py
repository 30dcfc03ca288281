"""Programs in other dtypes."""

import struct

import pytest

from fxpar.capture.retype import DOUBLE, retype
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


def test_constants_of_other_dtypes_cannot_be_converted():
    with pytest.raises(ValueError, match="bfloat16"):
        retype(program(Constant(TensorType((1,), "bfloat16"), b"\0\0")), {"bfloat16": "float32"})
