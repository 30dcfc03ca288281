"""A global tensor as the pieces of a mesh's ranks or of microbatches, and back.

The digits of :func:`fxpar.plans.layout.digits` say which block of a tensor dim a rank holds; a minor run of a compound
dim gives a strided block, flattened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod

import torch

from fxpar.plans.layout import Dims, Layout, Partial, Replicate, digits, local_shape
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Join, Program


def block(tensor: torch.Tensor, dims: Dims, layout: Layout, mesh: Mesh, coords: tuple[int, ...]) -> torch.Tensor:
    """The block of ``tensor`` (global) at ``coords``, shaped ``[digit, digit, ...]``, a view where torch allows one.

    Partial axes count as replicated here.
    """
    flat = [digit for row in digits(dims, layout, mesh, coords) for digit in row]
    view = tensor.reshape([digit.size for digit in flat])
    for index, digit in enumerate(flat):
        if digit.length != digit.size:
            view = view.narrow(index, digit.start, digit.length)
    return view


def scatter(tensor: torch.Tensor, dims: Dims, layout: Layout, mesh: Mesh, coords: tuple[int, ...]) -> torch.Tensor:
    """The local tensor of the rank at ``coords``.

    A pending sum is the value on coordinate 0 and zeros elsewhere; a pending maximum or minimum the value everywhere.
    """
    local = block(tensor, dims, layout, mesh, coords).reshape(local_shape(dims, layout, mesh, coords))
    zero = any(isinstance(p, Partial) and p.reduce == "sum" and c for p, c in zip(layout, coords, strict=True))
    return torch.zeros_like(local) if zero else local


def assemble(pieces: Sequence[torch.Tensor], dims: Dims, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The global tensor from the local tensors of all ranks (in rank order); pending values are reduced."""
    if not mesh.world_size or len(pieces) != mesh.world_size:
        raise ValueError(f"{len(pieces)} pieces for {mesh.world_size} ranks")
    shape = tuple(prod(atoms) for atoms in dims)
    summands: dict[tuple[int, ...], torch.Tensor] = {}
    kinds = {p.reduce for p in layout if isinstance(p, Partial)}
    for rank, piece in enumerate(pieces):
        coords = mesh.coordinates(rank)
        if any(isinstance(p, Replicate) and c for p, c in zip(layout, coords, strict=True)):
            continue
        key = tuple(c for p, c in zip(layout, coords, strict=True) if isinstance(p, Partial))
        whole = summands.setdefault(key, torch.empty(shape, dtype=piece.dtype))
        target = block(whole, dims, layout, mesh, coords)
        target.copy_(piece.reshape(target.shape))
    match sorted(kinds):
        case [] | ["sum"]:
            return reduce(torch.add, summands.values())
        case ["max"]:
            return reduce(torch.maximum, summands.values())
        case ["min"]:
            return reduce(torch.minimum, summands.values())
    raise ValueError(f"a value cannot be pending in {sorted(kinds)} at once")


def replica_disagreement(pieces: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> float:
    """Largest difference between ranks that should hold the same piece (0.0 when all agree to the bit).

    Differing NaN patterns count as infinite.
    """
    worst = 0.0
    for rank, piece in enumerate(pieces):
        coords = mesh.coordinates(rank)
        first = mesh.rank(tuple(0 if isinstance(p, Replicate) else c for p, c in zip(layout, coords, strict=True)))
        if first == rank or torch.equal(piece, pieces[first]) or not piece.numel():
            continue
        apart = (piece.to(torch.float64) - pieces[first].to(torch.float64)).abs()
        worst = max(worst, float("inf") if apart.isnan().any() else float(apart.max()))
    return worst


def input_of_microbatch(
    program: Program, position: int, tensors: Mapping[int, torch.Tensor], number: int
) -> torch.Tensor:
    """The global tensor of the program input at ``position`` for microbatch ``number``.

    Args:
        tensors: by value id, of the whole batch; of a seed the scalar. Nothing is needed for a ``microbatch`` input.
    """
    entry = program.inputs[position]
    if entry.kind == "microbatch":
        return torch.tensor(number, dtype=torch.int64)
    tensor = tensors[entry.value]
    if program.time is None:
        return tensor
    if entry.kind == "seed":
        return torch.stack([tensor.reshape(()), torch.full((), number, dtype=torch.int64, device=tensor.device)])
    dim = program.time.inputs[position]
    if dim < 0:
        return tensor
    length = tensor.shape[dim] // program.time.count
    return tensor.narrow(dim, number * length, length)


def join_microbatches(results: Sequence[torch.Tensor], join: Join) -> torch.Tensor:
    """The step's result from that of every microbatch, in order."""
    if isinstance(join, int):
        return torch.cat(list(results), join)
    if join in ("same", "chain"):
        return results[-1]
    total = reduce(torch.add, results)
    return total / len(results) if join == "mean" else total
