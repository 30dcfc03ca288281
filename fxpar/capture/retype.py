"""The same program in other dtypes, for comparisons in double precision."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

from fxpar.plans.program import Arg, Constant, Dtype, Program, TensorType

DOUBLE = {"float32": "float64", "complex64": "complex128"}
ALL_DOUBLE = {**DOUBLE, "bfloat16": "float64", "float16": "float64"}
"""Nothing is rounded to less than double."""
_CODES = {"float16": "e", "float32": "f", "float64": "d", "complex64": "f", "complex128": "d"}


def retype(program: Program, dtypes: Mapping[str, str]) -> Program:
    """Types, dtype arguments and constants with every dtype in ``dtypes`` replaced; numbers in arguments stay.

    ``{"float32": "float64"}`` also turns complex64 into complex128.

    Raises:
        ValueError: a constant of a replaced dtype cannot be converted (only real to real and complex to complex,
            and not to bfloat16).
    """
    table = dict(dtypes)
    if table.get("float32") == "float64":
        table.setdefault("complex64", "complex128")

    def kind(old: TensorType) -> TensorType:
        return TensorType(old.shape, table.get(old.dtype, old.dtype))

    def argument(arg: Arg) -> Arg:
        if isinstance(arg, Dtype):
            return Dtype(table.get(arg.name, arg.name))
        return tuple(argument(item) for item in arg) if isinstance(arg, tuple) else arg

    return msgspec.structs.replace(
        program,
        types=tuple(map(kind, program.types)),
        nodes=tuple(
            msgspec.structs.replace(node, args=tuple(argument(arg) for arg in node.args)) for node in program.nodes
        ),
        constants=tuple(Constant(kind(c.type), converted(c, kind(c.type).dtype)) for c in program.constants),
    )


def converted(constant: Constant, dtype: str) -> bytes:
    """The constant's bytes in another floating dtype."""
    if constant.type.dtype == dtype:
        return constant.data
    old, data = constant.type.dtype, constant.data
    if old == "bfloat16" and dtype in _CODES:
        # the upper half of a little-endian float32
        old, data = "float32", b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    if old not in _CODES or dtype not in _CODES or old.startswith("complex") != dtype.startswith("complex"):
        raise ValueError(f"cannot convert a constant from {old} to {dtype}")
    code, new = _CODES[old], _CODES[dtype]
    count = len(data) // struct.calcsize(f"<{code}")
    return struct.pack(f"<{count}{new}", *struct.unpack(f"<{count}{code}", data))
