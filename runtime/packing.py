"""Between local tensors and the flat buffers that a collective library moves.

``pack`` lays a step's tensors into one buffer, the library moves buffers of equal size (padded to the longest piece;
an all-to-all takes a size per peer), ``unpack`` trims and gives the results. The virtual mesh and the real groups
share both.

    all_gather      [outer, r, inner]  ->  n x [outer, longest, inner]      ->  [outer, sum of r, inner]
    reduce_scatter  [outer, N, inner]  ->  n x [outer, longest, inner]      ->  [outer, r, inner]
    all_to_all      [outer, r, middle, N, inner]  ->  one block per peer    ->  [outer, R, middle, n, inner]
    all_reduce      any shapes         ->  one row of all elements          ->  the same shapes
    halo            [outer, r, inner]  ->  the overlaps with peers' windows ->  [outer, window, inner]
    halo_sum        [outer, window, inner]  ->  the overlaps with peers' pieces  ->  [outer, r, inner]
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from fxpar.rules.expansion import overlap, pieces
from fxpar.runtime.local import Cut, Halo, Swap

Shape = tuple[int, ...]


def pack_gather(tensor: torch.Tensor, cut: Cut, me: int) -> torch.Tensor:
    """This rank's piece, padded to the longest: ``[outer, longest, inner]``."""
    piece = tensor.reshape(cut.outer, cut.lengths[me], cut.inner)
    longest = max(cut.lengths)
    if cut.lengths[me] == longest:
        return piece.contiguous()
    padded = piece.new_zeros(cut.outer, longest, cut.inner)
    padded[:, : cut.lengths[me]] = piece
    return padded


def unpack_gather(buffer: torch.Tensor, cut: Cut, shape: Shape) -> torch.Tensor:
    """The whole from all ranks' padded pieces."""
    longest, peers = max(cut.lengths), len(cut.lengths)
    pieces = buffer.reshape(peers, cut.outer, longest, cut.inner)
    if cut.outer == 1 and all(n == longest for n in cut.lengths):
        return pieces.reshape(shape)
    return torch.cat([pieces[i][:, :n] for i, n in enumerate(cut.lengths)], dim=1).view(shape)


def pack_scatter(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """One padded piece per peer: ``[peers * outer, longest, inner]``."""
    longest, peers = max(cut.lengths), len(cut.lengths)
    whole = tensor.reshape(cut.outer, sum(cut.lengths), cut.inner)
    if cut.outer == 1 and all(n == longest for n in cut.lengths):
        return whole.reshape(peers, longest, cut.inner).contiguous()
    buffer = whole.new_zeros(peers, cut.outer, longest, cut.inner)
    for i, piece in enumerate(whole.split(list(cut.lengths), dim=1)):
        buffer[i, :, : cut.lengths[i]] = piece
    return buffer.view(peers * cut.outer, longest, cut.inner)


def unpack_scatter(buffer: torch.Tensor, cut: Cut, me: int, shape: Shape) -> torch.Tensor:
    """This rank's reduced piece without its padding."""
    return buffer.view(cut.outer, max(cut.lengths), cut.inner)[:, : cut.lengths[me]].contiguous().view(shape)


def pack_gathers(tensors: Sequence[torch.Tensor], cuts: Sequence[Cut], me: int) -> torch.Tensor:
    """A bucket's padded pieces in one row."""
    if len(cuts) == 1:
        return pack_gather(tensors[0], cuts[0], me)
    return torch.cat([pack_gather(t, cut, me).view(-1) for t, cut in zip(tensors, cuts, strict=True)])


def unpack_gathers(buffer: torch.Tensor, cuts: Sequence[Cut], shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """A bucket's wholes from all ranks' rows."""
    sizes = [_padded(cut) for cut in cuts]
    rows = buffer.view(len(cuts[0].lengths), sum(sizes)).split(sizes, dim=1)
    # a row of one element a rank would be a view that holds the whole bucket's buffer
    return [unpack_gather(row, cut, shape).contiguous() for row, cut, shape in zip(rows, cuts, shapes, strict=True)]


def pack_scatters(tensors: Sequence[torch.Tensor], cuts: Sequence[Cut]) -> torch.Tensor:
    """A bucket as one row per peer."""
    if len(cuts) == 1:
        return pack_scatter(tensors[0], cuts[0])
    peers = len(cuts[0].lengths)
    rows = [pack_scatter(t, cut).view(peers, _padded(cut)) for t, cut in zip(tensors, cuts, strict=True)]
    return torch.cat(rows, dim=1)


def unpack_scatters(buffer: torch.Tensor, cuts: Sequence[Cut], me: int, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """This rank's reduced pieces of a bucket."""
    rows = buffer.view(-1).split([_padded(cut) for cut in cuts])
    return [unpack_scatter(row, cut, me, shape) for row, cut, shape in zip(rows, cuts, shapes, strict=True)]


def _padded(cut: Cut) -> int:
    return cut.outer * max(cut.lengths) * cut.inner


def exchange_sizes(swap: Swap, me: int) -> tuple[list[int], list[int]]:
    """(elements to every peer, elements from every peer) of an all-to-all."""
    rest = swap.outer * swap.middle * swap.inner
    return [rest * swap.joined[me] * n for n in swap.cut], [rest * n * swap.cut[me] for n in swap.joined]


def pack_exchange(tensor: torch.Tensor, swap: Swap, me: int) -> torch.Tensor:
    """One row: for every peer the part of this rank's piece that falls into the peer's cut."""
    mine, whole = swap.joined[me], sum(swap.cut)
    first, second = (mine, whole) if swap.joined_first else (whole, mine)
    view = tensor.reshape(swap.outer, first, swap.middle, second, swap.inner)
    parts = view.split(list(swap.cut), dim=3 if swap.joined_first else 1)
    return torch.cat([part.reshape(-1) for part in parts])


def unpack_exchange(buffer: torch.Tensor, swap: Swap, me: int, shape: Shape) -> torch.Tensor:
    """The joined region from all peers, restricted to this rank's cut."""
    _, sizes = exchange_sizes(swap, me)
    blocks = []
    for length, flat in zip(swap.joined, buffer.split(sizes), strict=True):
        first, second = (length, swap.cut[me]) if swap.joined_first else (swap.cut[me], length)
        blocks.append(flat.view(swap.outer, first, swap.middle, second, swap.inner))
    return torch.cat(blocks, dim=1 if swap.joined_first else 3).view(shape)


def pack_row(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements of all tensors in one row (a single tensor as it is)."""
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


def unpack_row(buffer: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Inverse of ``pack_row``; the results of a bucket are views of the one row."""
    if len(shapes) == 1:
        return [buffer.view(shapes[0])]
    rows = buffer.split([prod(shape) for shape in shapes])
    return [row.view(shape) for row, shape in zip(rows, shapes, strict=True)]


def local_slice(tensor: torch.Tensor, outer: int, start: int, length: int, inner: int, shape: Shape) -> torch.Tensor:
    """Elements ``[start, start + length)`` of the middle of ``[outer, size, inner]``, as a tensor of ``shape``.

    Contiguous: some kernels (layer norm's backward on the CPU) misread statistics that are not.
    """
    if not prod(shape):
        return tensor.new_empty(shape)
    size = tensor.numel() // (outer * inner)
    return tensor.reshape(outer, size, inner)[:, start : start + length].contiguous().view(shape)


def _overlaps(halo: Halo, me: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(of my piece with every peer's window, of my window with every peer's piece), nothing of my own."""
    held, windows = pieces(halo.lengths), list(zip(halo.starts, halo.ends, strict=True))
    sent = [overlap(held[me], w) if i != me else (0, 0) for i, w in enumerate(windows)]
    taken = [overlap(h, windows[me]) if i != me else (0, 0) for i, h in enumerate(held)]
    return sent, taken


def halo_sizes(halo: Halo, me: int, summed: bool) -> tuple[list[int], list[int]]:
    """(elements to every peer, elements from every peer)."""
    sent, taken = ([(end - start) * halo.outer * halo.inner for start, end in row] for row in _overlaps(halo, me))
    return (taken, sent) if summed else (sent, taken)


def pack_halo(tensor: torch.Tensor, halo: Halo, me: int, summed: bool) -> torch.Tensor:
    """One row: what of this rank's piece (of its window, for the sum) every peer is to have."""
    sent, taken = _overlaps(halo, me)
    row, first = (taken, halo.starts[me]) if summed else (sent, pieces(halo.lengths)[me][0])
    length = halo.ends[me] - halo.starts[me] if summed else halo.lengths[me]
    view = tensor.reshape(halo.outer, length, halo.inner)
    return torch.cat([view[:, start - first : end - first].reshape(-1) if end > start else view.new_empty(0)
                      for start, end in row])  # fmt: skip


def unpack_halo(
    buffer: torch.Tensor, tensor: torch.Tensor, halo: Halo, me: int, summed: bool, shape: Shape
) -> torch.Tensor:
    """This rank's window from its own piece and what peers sent; for the sum its piece from its own window and theirs.

    ``tensor`` is what this rank packed.
    """
    sent, taken = _overlaps(halo, me)
    piece, window = pieces(halo.lengths)[me], (halo.starts[me], halo.ends[me])
    have, want = (window, piece) if summed else (piece, window)
    view = tensor.reshape(halo.outer, have[1] - have[0], halo.inner)
    result = view.new_full((halo.outer, want[1] - want[0], halo.inner), 0.0 if summed else halo.fill)
    start, end = overlap(have, want)
    result[:, start - want[0] : end - want[0]] = view[:, start - have[0] : end - have[0]]
    row = sent if summed else taken
    for (start, end), flat in zip(row, buffer.split(halo_sizes(halo, me, summed)[1]), strict=True):
        if end > start:
            part = flat.view(halo.outer, end - start, halo.inner)
            here = result[:, start - want[0] : end - want[0]]
            here.add_(part) if summed else here.copy_(part)
    return result.view(shape)
