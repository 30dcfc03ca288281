"""The collectives of a local program on real process groups: start early, finish at first use.

``start_*`` packs and issues, ``finish_*`` waits, trims and shapes; both are called from generated code with numbers,
tensors and a group's name only. This is the one file that knows torch's functional collectives (private names).
"""

from __future__ import annotations

import torch

from fxpar.runtime.local import Cut, Halo, Swap
from fxpar.runtime.packing import (
    Shape,
    exchange_sizes,
    halo_sizes,
    local_slice,
    pack_exchange,
    pack_gathers,
    pack_halo,
    pack_row,
    pack_scatters,
    unpack_exchange,
    unpack_gathers,
    unpack_halo,
    unpack_row,
    unpack_scatters,
)
from fxpar.runtime.wire import from_wire, to_wire

_ops = torch.ops._c10d_functional
WAIT = _ops.wait_tensor.default
"""The op that waits for a collective."""


def _arrived(buffer: torch.Tensor, dtype: str) -> torch.Tensor:
    """The buffer once the library is done with it."""
    return from_wire(_ops.wait_tensor(buffer), dtype)


def start_all_reduce(tensors: list[torch.Tensor], reduce: str, group: str) -> torch.Tensor:
    """Issue the reduction of a bucket of tensors."""
    if len(tensors) == 1:
        return _ops.all_reduce(to_wire(tensors[0].contiguous()), reduce, group)
    return _ops.all_reduce_(to_wire(pack_row(tensors)), reduce, group)


def finish_all_reduce(buffer: torch.Tensor, shapes: list[Shape], dtype: str) -> list[torch.Tensor]:
    """The bucket's tensors."""
    return unpack_row(_arrived(buffer, dtype), shapes)


Numbers = tuple[int, list[int], int]
"""A :class:`Cut` as generated code writes it: (outer, lengths, inner)."""


def _cuts(rows: list[Numbers]) -> list[Cut]:
    return [Cut(outer, tuple(lengths), inner) for outer, lengths, inner in rows]


def start_all_gather(tensors: list[torch.Tensor], cuts: list[Numbers], me: int, group: str) -> torch.Tensor:
    """Issue the gathering of a bucket."""
    return _ops.all_gather_into_tensor(to_wire(pack_gathers(tensors, _cuts(cuts), me)), len(cuts[0][1]), group)


def finish_all_gather(
    buffer: torch.Tensor, cuts: list[Numbers], shapes: list[Shape], dtype: str
) -> list[torch.Tensor]:
    """The wholes."""
    return unpack_gathers(_arrived(buffer, dtype), _cuts(cuts), shapes)


def start_reduce_scatter(tensors: list[torch.Tensor], cuts: list[Numbers], reduce: str, group: str) -> torch.Tensor:
    """Issue the reduction of a bucket, of which every rank keeps its pieces."""
    return _ops.reduce_scatter_tensor(to_wire(pack_scatters(tensors, _cuts(cuts))), reduce, len(cuts[0][1]), group)


def finish_reduce_scatter(
    buffer: torch.Tensor, cuts: list[Numbers], me: int, shapes: list[Shape], dtype: str
) -> list[torch.Tensor]:
    """This rank's pieces."""
    return unpack_scatters(_arrived(buffer, dtype), _cuts(cuts), me, shapes)


def _swap(around: list[int], joined: list[int], cut: list[int], joined_first: bool) -> Swap:
    outer, middle, inner = around
    return Swap(outer, middle, inner, tuple(joined), tuple(cut), joined_first)


def start_all_to_all(
    tensor: torch.Tensor, around: list[int], joined: list[int], cut: list[int], joined_first: bool, me: int, group: str
) -> torch.Tensor:
    """Issue the exchange; ``around`` is (outer, middle, inner)."""
    swap = _swap(around, joined, cut, joined_first)
    sent, received = exchange_sizes(swap, me)
    return _ops.all_to_all_single(to_wire(pack_exchange(tensor, swap, me)), received, sent, group)


def finish_all_to_all(
    buffer: torch.Tensor,
    around: list[int],
    joined: list[int],
    cut: list[int],
    joined_first: bool,
    me: int,
    shape: Shape,
    dtype: str,
) -> list[torch.Tensor]:
    """The joined region, cut anew (the only one of the list)."""
    return [unpack_exchange(_arrived(buffer, dtype), _swap(around, joined, cut, joined_first), me, shape)]


HaloNumbers = tuple[list[int], list[int], list[int], list[int], float]
"""A :class:`Halo` as generated code writes it: ([outer, inner], lengths, starts, ends, fill)."""


def _halo(numbers: HaloNumbers) -> Halo:
    (outer, inner), lengths, starts, ends, fill = numbers
    return Halo(outer, tuple(lengths), inner, tuple(starts), tuple(ends), float(fill))


def start_halo(tensor: torch.Tensor, numbers: HaloNumbers, me: int, summed: bool, group: str) -> torch.Tensor:
    """Issue the exchange with the ranks whose windows overlap this rank's piece, in practice its neighbours."""
    halo = _halo(numbers)
    sent, received = halo_sizes(halo, me, summed)
    return _ops.all_to_all_single(to_wire(pack_halo(tensor, halo, me, summed)), received, sent, group)


def finish_halo(
    buffer: torch.Tensor, tensor: torch.Tensor, numbers: HaloNumbers, me: int, summed: bool, shape: Shape, dtype: str
) -> list[torch.Tensor]:
    """This rank's window (the only one of the list); ``summed``: its piece."""
    return [unpack_halo(_arrived(buffer, dtype), tensor, _halo(numbers), me, summed, shape)]


def take_slice(tensor: torch.Tensor, outer: int, start: int, length: int, inner: int, shape: Shape) -> torch.Tensor:
    """This rank's chunk of a value it holds whole."""
    return local_slice(tensor, outer, start, length, inner, shape)


def zeros_alike(tensor: torch.Tensor) -> torch.Tensor:
    """The summand of a rank that adds nothing."""
    return torch.zeros_like(tensor)


def add_in_place(total: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The total, one summand further."""
    return total.add_(tensor)
