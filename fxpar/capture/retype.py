"""The same program in other dtypes, for comparisons in double precision."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

from fxpar.plans.program import Arg, Constant, Dtype, Program, TensorType

DOUBLE = {"float32": "float64", "complex64": "complex128"}
_CODES = {"float32": ("f", 1), "float64": ("d", 1), "complex64": ("f", 2), "complex128": ("d", 2)}


def retype(program: Program, dtypes: Mapping[str, str]) -> Program:
    """Types, dtype arguments and constants with every dtype in ``dtypes`` replaced; numbers in arguments stay.

    ``{"float32": "float64"}`` also turns complex64 into complex128.

    Raises:
        ValueError: a constant of a replaced dtype cannot be converted (only float32/64, complex64/128 can).
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
    if constant.type.dtype not in _CODES or dtype not in _CODES:
        raise ValueError(f"cannot convert a constant from {constant.type.dtype} to {dtype}")
    old, new = _CODES[constant.type.dtype][0], _CODES[dtype][0]
    count = len(constant.data) // struct.calcsize(f"<{old}")
    return struct.pack(f"<{count}{new}", *struct.unpack(f"<{count}{old}", constant.data))
