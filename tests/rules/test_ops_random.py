"""Stateless random ops: the right distribution, the same draws on every cut of the tensor."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpar.rules.ops  # noqa: F401
from fxpar.rules.ops.stateless import keep_mask, linear_index, random_bits, whole_geometry

torch.set_num_threads(1)
CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_block_holds_the_elements_of_the_whole(data):
    """Any cut of any mixed-radix digits gives the whole tensor's bits at those indices."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    whole = random_bits(torch.tensor(7), 3, whole_geometry(sizes), sizes, CPU)
    index = linear_index(whole_geometry(sizes), CPU).view(sizes)
    geometry, cut = [], []
    for size in sizes:
        start = data.draw(st.integers(0, size))
        length = data.draw(st.integers(0, size - start))
        geometry += [size, start, length]
        cut.append(slice(start, start + length))
    local = whole[tuple(cut)]
    assert torch.equal(random_bits(torch.tensor(7), 3, geometry, local.shape, CPU), local)
    assert torch.equal(linear_index(geometry, CPU).view(local.shape), index[tuple(cut)])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_fraction_and_scale(p):
    x = torch.randn(300, 200)
    out, mask = torch.ops.fxpar.dropout(x, torch.tensor(5), p, 2, whole_geometry(x.shape))
    assert abs((~mask).double().mean() - p) < 0.01
    assert torch.allclose(out, torch.zeros_like(x) if p == 1 else x * mask / (1 - p))


def test_streams_differ_by_seed_and_op_and_are_uncorrelated():
    bits = [
        random_bits(torch.tensor(seed), op, [4096, 0, 4096], [4096], CPU)
        for seed, op in itertools.product(range(3), range(3))
    ]
    values = torch.stack(bits).double() / 2**53
    assert torch.corrcoef(values).fill_diagonal_(0).abs().max() < 0.07
    again = random_bits(torch.tensor(0), 0, [4096, 0, 4096], [4096], CPU)
    assert torch.equal(bits[0], again)


def test_bits_are_uniform_in_every_position():
    bits = random_bits(torch.tensor(11), 1, [1 << 16, 0, 1 << 16], [1 << 16], CPU)
    ones = torch.stack([(bits >> k & 1).double().mean() for k in range(53)])
    assert (ones - 0.5).abs().max() < 0.012
    lagged = torch.corrcoef(torch.stack([bits[:-1], bits[1:]]).double())[0, 1]
    assert abs(lagged) < 0.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_and_normal(dtype):
    x = torch.empty(200, 300, dtype=dtype)
    u = torch.ops.fxpar.uniform(x, torch.tensor(1), 0, whole_geometry(x.shape))
    assert u.dtype == dtype and u.min() >= 0 and u.max() < 1
    assert abs(u.double().mean() - 0.5) < 0.01 and abs(u.double().var() - 1 / 12) < 0.005
    n = torch.ops.fxpar.normal(x, torch.tensor(1), 0, whole_geometry(x.shape)).double()
    assert n.isfinite().all() and abs(n.mean()) < 0.02 and abs(n.std() - 1) < 0.02


def test_wrong_geometry_is_refused():
    with pytest.raises(ValueError, match="describes 6 elements"):
        keep_mask(torch.tensor(0), 0, 0.5, [6, 0, 6], [5], CPU)
