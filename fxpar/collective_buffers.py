"""Bytes that one rank allocates to take part in a collective, beyond its operands.

Follows ``fxpar.runtime.packing`` and ``fxpar.runtime.collectives`` line by line: operands are packed into one row where
they do not travel as they are, the library fills a second one, results are cut out of that.

    start      operands -> packed -> received      the packed row stays until the library is done
    finish     received -> results                 results that are views of what was received keep it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from fxpar.runtime.local import CollectiveStep, Cut, Geometry, Halo, LocalProgram, Swap, dtype_bytes
from fxpar.runtime.packing import exchange_sizes, halo_sizes


@dataclass(frozen=True)
class Buffers:
    """Bytes of one collective on one rank.

    Attributes:
        starting: the most that is allocated at once while it is issued, ``sent`` and ``received`` included.
        sent: what stays packed until it is finished; 0 when an operand travels as it is.
        received: what the library writes; a result that is ``shared`` is a view of it.
        shared: per result.
        finishing: what is allocated and freed while results are cut out, besides them.
        holds: operands stay until it is finished, read again or not.
    """

    starting: int
    sent: int
    received: int
    shared: tuple[bool, ...]
    finishing: int = 0
    holds: bool = False


def collective_buffers(
    step: CollectiveStep, local: LocalProgram, contiguous: Sequence[bool],
    copied: Callable[[int, tuple[int, ...]], bool],
) -> Buffers:
    """Buffers of a step of ``local``.

    Args:
        contiguous: per operand, whether its elements lie in order without gaps.
        copied: (operand, shape) -> whether seeing a local value in that shape takes a copy.
    """
    element, me = dtype_bytes(step.dtype), local.coords[step.axis]
    sizes = [prod(local.types[v].shape) for v in step.values]
    # a copy in order is made of what is not
    moved = [0 if row else size for size, row in zip(sizes, contiguous, strict=True)]
    # another only where it cannot be seen as its geometry does (a reduction of whole tensors has none)
    seen = [size if copied(value, _view(geometry, step, me)) else 0
            for geometry, value, size in zip(step.geometries, step.values, sizes, strict=False)]
    cuts = [g for g in step.geometries if isinstance(g, Cut)]
    if step.kind == "all_reduce":
        total = sum(sizes)
        found = Buffers(total + sum(moved), 0, total, (True,) * len(sizes))
    elif step.kind == "all_gather":
        found = _gathered(cuts, moved, seen)
    elif step.kind == "reduce_scatter":
        found = _scattered(cuts, moved, seen, me)
    elif step.kind == "all_to_all":
        swap = step.geometries[0]
        assert isinstance(swap, Swap)
        found = _exchanged(swap, sizes[0], seen[0], me)
    else:
        halo = step.geometries[0]
        assert isinstance(halo, Halo)
        given, taken = map(sum, halo_sizes(halo, me, step.kind == "halo_sum"))
        rows = given if halo.outer > 1 else 0
        starting = max(seen[0] + rows + given, given + taken)
        found = Buffers(starting, given, taken, (False,), seen[0], holds=True)
    return Buffers(found.starting * element, found.sent * element, found.received * element, found.shared,
                   found.finishing * element, found.holds)


def _view(geometry: Geometry, step: CollectiveStep, me: int) -> tuple[int, ...]:
    """The shape in which a geometry sees an operand, as ``fxpar.runtime.packing`` does."""
    match geometry:
        case Cut():
            size = geometry.lengths[me] if step.kind == "all_gather" else sum(geometry.lengths)
            return geometry.outer, size, geometry.inner
        case Swap():
            mine, whole = geometry.joined[me], sum(geometry.cut)
            first, second = (mine, whole) if geometry.joined_first else (whole, mine)
            return geometry.outer, first, geometry.middle, second, geometry.inner
        case Halo():
            window = geometry.ends[me] - geometry.starts[me]
            return geometry.outer, window if step.kind == "halo_sum" else geometry.lengths[me], geometry.inner


def _gathered(cuts: Sequence[Cut], moved: Sequence[int], seen: Sequence[int]) -> Buffers:
    padded = [cut.outer * max(cut.lengths) * cut.inner for cut in cuts]
    received = len(cuts[0].lengths) * sum(padded)
    # ranks with a short piece pad a copy of it: they are the ones who hold more, also where this rank's is not short
    short = [min(cut.lengths) < max(cut.lengths) for cut in cuts]
    own = [p if s else m for p, s, m in zip(padded, short, moved, strict=True)]
    passing = max((c for c, s in zip(seen, short, strict=True) if s), default=0)
    if len(cuts) == 1:
        cut = cuts[0]
        in_order = cut.outer == 1 and len(set(cut.lengths)) == 1
        return Buffers(max(own[0] + passing, own[0] + received), own[0], received, (in_order,), holds=not own[0])
    row = sum(padded)
    return Buffers(max(sum(own) + max(passing, row), row + received), row, received, (False,) * len(cuts))


def _scattered(cuts: Sequence[Cut], moved: Sequence[int], seen: Sequence[int], me: int) -> Buffers:
    pieces = [cut.outer * max(cut.lengths) * cut.inner for cut in cuts]
    peers, received = len(cuts[0].lengths), sum(pieces)
    in_order = [cut.outer == 1 and len(set(cut.lengths)) == 1 for cut in cuts]
    own = [m if o else peers * p for m, o, p in zip(moved, in_order, pieces, strict=True)]
    passing = max((c for c, o in zip(seen, in_order, strict=True) if not o), default=0)
    shared = tuple(cut.outer == 1 or cut.lengths[me] == max(cut.lengths) for cut in cuts)
    if len(cuts) == 1:
        return Buffers(own[0] + max(passing, received), own[0], received, shared, holds=not own[0])
    row = peers * received
    return Buffers(max(sum(own) + max(passing, row), row + received), row, received, shared)


def _exchanged(swap: Swap, size: int, moved: int, me: int) -> Buffers:
    received = sum(exchange_sizes(swap, me)[1])
    # a peer's part is copied before it enters the row, unless it is the outermost region that is cut
    ahead = swap.outer * (swap.joined[me] * swap.middle if swap.joined_first else 1)
    parts = size if ahead > 1 else 0
    return Buffers(max(moved + parts + size, size + received), size, received, (False,))
