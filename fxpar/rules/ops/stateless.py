"""Stateless random bits: bits = hash(seed, op id, global linear index), in plain integer tensor ops.

The same element gets the same bits on every layout, rank and recomputation. ``geometry`` is a flat list of
(size, start, length) triples: the mixed-radix digits, major first, of the global linear index; their lengths multiply
to the number of local elements in row-major order. One more number behind the triples says that the batch is cut in
time, too: the elements by which each microbatch moves on. The seed is then ``[seed, number of the microbatch]``.
The finaliser is David Stafford's variant 13 of the MurmurHash3 mixer, as in SplitMix64 (Steele, Lea, Flood: Fast
Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
BITS = 53
CHUNK = 1 << 15  # elements mixed at a time on a CPU: the int64 scratch stays in the second-level cache


def signed(value: int) -> int:
    """The int64 with the bit pattern of ``value`` mod 2**64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def logical_shift_(z: Tensor, bits: int) -> Tensor:
    """``z >> bits`` with zeros shifted in, in place."""
    return z.bitwise_right_shift_(bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix_(z: Tensor, scratch: Tensor) -> Tensor:
    """The 64-bit finaliser, in place; ``scratch`` is overwritten."""
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        logical_shift_(scratch.copy_(z), shift)
        z.bitwise_xor_(scratch).mul_(signed(factor))
    logical_shift_(scratch.copy_(z), 31)
    return z.bitwise_xor_(scratch)


def stream_key(seed: Tensor, op_id: int) -> Tensor:
    """Start of the bit stream of one op: an int64 scalar on the seed's device (of two numbers the first)."""
    key = seed.to(torch.int64).reshape(-1)[0] + signed(GOLDEN * (op_id + 1))
    key = mix_(key.clone(), torch.empty_like(key))
    key = key.bitwise_xor_(signed(GOLDEN * (2 * op_id + 1)))
    return mix_(key, torch.empty_like(key))


def merged_digits(geometry: Sequence[int]) -> list[tuple[int, int, int]]:
    """The geometry's triples with every whole digit folded into the one before it."""
    merged: list[tuple[int, int, int]] = []
    for size, start, length in zip(geometry[0::3], geometry[1::3], geometry[2::3], strict=True):
        if merged and start == 0 and length == size:
            outer_size, outer_start, outer_length = merged.pop()
            merged.append((outer_size * size, outer_start * size, outer_length * size))
        else:
            merged.append((size, start, length))
    return merged or [(1, 0, 1)]


def linear_index_rows(geometry: Sequence[int], device: torch.device) -> tuple[Tensor, int]:
    """(first global index of every local run of adjacent elements, length of a run)."""
    *outer, (size, start, length) = merged_digits(geometry)
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for outer_size, outer_start, outer_length in outer:
        digit = torch.arange(outer_start, outer_start + outer_length, dtype=torch.int64, device=device)
        rows = (rows[:, None] * outer_size + digit).flatten()
    return rows * size + start, length


def linear_index(geometry: Sequence[int], device: torch.device) -> Tensor:
    """Global linear index of every local element, int64, flat."""
    rows, length = linear_index_rows(geometry, device)
    return (rows[:, None] + torch.arange(length, dtype=torch.int64, device=device)).flatten()


def random_bits(
    seed: Tensor, op_id: int, geometry: Sequence[int], shape: Sequence[int], device: torch.device
) -> Tensor:
    """``BITS`` uniform random bits per local element as int64, in ``shape`` (row-major local order)."""
    triples = len(geometry) // 3 * 3
    rows, length = linear_index_rows(geometry[:triples], device)
    if triples < len(geometry):
        rows += seed.to(device).reshape(-1)[1] * geometry[-1]
    total = rows.numel() * length
    if total != math.prod(shape):
        raise ValueError(f"geometry {list(geometry)} describes {total} elements, the tensor has shape {tuple(shape)}")
    key = stream_key(seed.to(device), op_id)
    # The counter is multiplied by GOLDEN before mixing; doing so on rows and columns apart saves a pass.
    rows = rows.mul_(signed(GOLDEN)).add_(key)
    columns = torch.arange(length, dtype=torch.int64, device=device).mul_(signed(GOLDEN))
    out = torch.empty(rows.numel(), length, dtype=torch.int64, device=device)
    torch.add(rows[:, None], columns, out=out)
    flat = out.view(-1)
    step = CHUNK if device.type == "cpu" else max(total, 1)
    scratch = torch.empty(min(step, total), dtype=torch.int64, device=device)
    for begin in range(0, total, step):
        part = flat[begin : begin + step]
        logical_shift_(mix_(part, scratch[: part.numel()]), 64 - BITS)
    return flat.view(tuple(shape))


def uniform(seed: Tensor, op_id: int, geometry: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """Uniform in [0, 1), float64."""
    return random_bits(seed, op_id, geometry, shape, device).to(torch.float64).mul_(2.0**-BITS)


def keep_mask(
    seed: Tensor, op_id: int, probability: float, geometry: Sequence[int], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Bool mask, True with probability ``1 - probability`` (the dropout probability)."""
    return random_bits(seed, op_id, geometry, shape, device) >= round(probability * 2**BITS)


def whole_geometry(shape: Sequence[int]) -> list[int]:
    """Geometry of a tensor that is not cut: one digit a dim."""
    return [number for size in shape for number in (size, 0, size)]
