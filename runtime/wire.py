"""What dtypes travel as: the libraries that move tensors (gloo, NCCL) know only some.

    bool, float8    the same bytes as uint8         complex    a last dim of 2: real and imaginary part
    uint64          the same bytes as int64         int16, uint16, uint32    the next wider signed integer
"""

from __future__ import annotations

import torch
from torch import Tensor

SAME_BYTES = {
    "bool": torch.uint8, "uint64": torch.int64, "float8_e4m3fn": torch.uint8, "float8_e5m2": torch.uint8,
    "float8_e4m3fnuz": torch.uint8, "float8_e5m2fnuz": torch.uint8,
}  # fmt: skip
WIDER = {"int16": torch.int32, "uint16": torch.int32, "uint32": torch.int64}


def to_wire(tensor: Tensor) -> Tensor:
    """The tensor as the libraries take it; its first dim stays what it is."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype in SAME_BYTES:
        return tensor.view(SAME_BYTES[dtype])
    if dtype in WIDER:
        return tensor.to(WIDER[dtype])
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def from_wire(arrived: Tensor, dtype: str) -> Tensor:
    """What travelled, in its own dtype again."""
    if dtype in SAME_BYTES:
        return arrived.view(getattr(torch, dtype))
    if dtype in WIDER:
        return arrived.to(getattr(torch, dtype))
    return torch.view_as_complex(arrived) if dtype.startswith("complex") else arrived
