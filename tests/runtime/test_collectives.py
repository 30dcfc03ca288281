"""Every collective on real gloo ranks, in every dtype that a program may have."""

import pytest
import torch

from fxpar.plans.dtypes import DTYPE_BYTES
from fxpar.plans.mesh import parse_mesh
from fxpar.runtime import collectives as comm
from fxpar.runtime.groups import connect
from tests.runtime.ranks import run_ranks, values

LENGTHS = (2, 1)
SUMMED = [name for name in DTYPE_BYTES if not name.startswith(("float8", "uint", "bool")) or name == "uint8"]


def numbered(rank, dtype, shape):
    """Small whole numbers, other ones on every rank; complex ones with an imaginary part."""
    plain = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + 10 * rank
    if dtype.startswith("complex"):
        return torch.complex(plain, -2 * plain).to(getattr(torch, dtype))
    return (plain % 2 if dtype == "bool" else plain).to(getattr(torch, dtype))


def moved(rank, group, dtype):
    """(gathered, exchanged), and what they should be."""
    cut = (3, LENGTHS, 2)
    mine = numbered(rank, dtype, (3, LENGTHS[rank], 2))
    (gathered,) = comm.finish_all_gather(
        comm.start_all_gather([mine], [cut], rank, group), [cut], [(3, 3, 2)], dtype
    )
    whole = torch.cat([numbered(r, dtype, (3, LENGTHS[r], 2)).view(3, -1, 2) for r in (0, 1)], 1)
    swap = ((1, 1, 1), LENGTHS, (1, 2), True, rank)
    row = numbered(rank, dtype, (LENGTHS[rank], 3))
    shape = (3, (1, 2)[rank])
    (exchanged,) = comm.finish_all_to_all(comm.start_all_to_all(row, *swap, group), *swap, shape, dtype)
    columns = torch.cat([numbered(r, dtype, (LENGTHS[r], 3)) for r in (0, 1)])
    return (gathered, whole), (exchanged, columns[:, :1] if rank == 0 else columns[:, 1:])


def added(rank, group, dtype):
    """(reduced, scattered, one of a bucket of two), and what they should be."""
    mine, other = (numbered(r, dtype, (3, 2)) for r in (rank, 1 - rank))
    total = mine + other
    (reduced,) = comm.finish_all_reduce(comm.start_all_reduce([mine], "sum", group), [(3, 2)], dtype)
    cut = (1, LENGTHS, 2)
    buffer = comm.start_reduce_scatter([mine], [cut], "sum", group)
    (scattered,) = comm.finish_reduce_scatter(buffer, [cut], rank, [(LENGTHS[rank], 2)], dtype)
    _, second = comm.finish_all_reduce(comm.start_all_reduce([mine, mine], "sum", group), [(3, 2), (6,)], dtype)
    return (reduced, total), (scattered, total[:2] if rank == 0 else total[2:]), (second, total.flatten())


def differing(rank):
    groups = connect(parse_mesh("2"))
    (group,) = groups.names
    found = []
    for dtype in DTYPE_BYTES:
        pairs = [*moved(rank, group, dtype), *(added(rank, group, dtype) if dtype in SUMMED else ())]
        same = [a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist() for a, b in pairs]
        found += [] if all(same) else [(dtype, same)]
    return found


@pytest.mark.timeout(120)
def test_every_dtype_travels():
    assert values(run_ranks(differing, 2)) == [[], []]
