"""Layouts: torch.chunk's pieces, every element on exactly one rank, sizes of the largest piece."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.plans.layout import (
    Partial,
    Replicate,
    Shard,
    chunk,
    digits,
    global_shape,
    largest_shape,
    largest_size,
    layout_text,
    local_shape,
    runs_of,
    valid_layout,
    whole_dims,
)
from tests.plans.draw import all_dims, layouts, meshes, places

torch.set_num_threads(1)


@given(st.integers(0, 50), st.integers(1, 12), st.integers(0, 5))
def test_chunk_is_that_of_torch(length: int, parts: int, start: int):
    pieces = [p.tolist() for p in torch.arange(start, start + length).chunk(parts)] if length else []
    pieces += [[]] * (parts - len(pieces))
    found = [chunk(start, length, parts, i) for i in range(parts)]
    assert [list(range(low, low + size)) for low, size in found] == pieces
    assert all(start <= low <= start + length for low, _ in found)


@given(meshes(), all_dims(empty=True), st.data())
def test_every_element_lies_on_one_rank_of_the_sharded_axes(mesh, dims, data):
    layout = data.draw(layouts(dims, mesh))
    for dim, atoms in enumerate(dims):
        cut = tuple(a for a, p in enumerate(layout) if isinstance(p, Shard) and p.dim == dim)
        for group in mesh.groups(cut):
            held = []
            for rank in group:
                row = digits(dims, layout, mesh, mesh.coordinates(rank))[dim]
                assert math.prod(d.size for d in row) == math.prod(atoms)
                held += itertools.product(*(range(d.start, d.start + d.length) for d in row))
            everything = itertools.product(*(range(d.size) for d in row))
            assert sorted(held) == sorted(everything)


@given(meshes(), all_dims(empty=True), st.data())
def test_the_largest_piece_is_that_of_the_first_rank(mesh, dims, data):
    layout = data.draw(layouts(dims, mesh, pending=True))
    shapes = [local_shape(dims, layout, mesh, mesh.coordinates(rank)) for rank in range(mesh.world_size)]
    assert largest_shape(dims, layout, mesh) == shapes[0] == tuple(map(max, zip(*shapes, strict=True)))
    assert largest_size(dims, layout, mesh) == max(math.prod(s) for s in shapes)


@given(all_dims(), st.data())
def test_a_layout_is_valid_when_cuts_are_equal_or_apart(dims, data):
    wrong = [Shard(len(dims)), Shard(0, len(dims[0])), Shard(0, -1, 2), Shard(-1)]
    options = [Replicate(), Partial("sum"), *places(dims), *wrong]
    layout = tuple(data.draw(st.lists(st.sampled_from(options), min_size=1, max_size=3)))
    sets = [{(p.dim, a) for a in range(p.first, p.first + p.length)} for p in layout if isinstance(p, Shard)]
    atoms = {(d, a) for d, row in enumerate(dims) for a in range(len(row))}
    inside = all(s and s <= atoms for s in sets)
    apart = all(a == b or a.isdisjoint(b) for a, b in itertools.combinations(sets, 2))
    assert valid_layout(layout, dims) == (inside and apart)


@given(meshes(), all_dims(), st.data())
def test_runs_cover_the_dim_once_in_order(mesh, dims, data):
    layout = data.draw(layouts(dims, mesh))
    for dim, atoms in enumerate(dims):
        runs = runs_of(layout, dim, len(atoms))
        assert [a for first, n in runs for a in range(first, first + n)] == list(range(len(atoms)))
        assert {(p.first, p.length) for p in layout if isinstance(p, Shard) and p.dim == dim} <= set(runs)


def test_names_and_whole_dims():
    assert layout_text((Replicate(), Shard(0), Shard(1, 2, 1), Partial("max"))) == "[R, S(0), S(1.2+1), P(max)]"
    assert whole_dims((4, 1, 0)) == ((4,), (), (0,))
    assert global_shape(whole_dims((4, 1, 0))) == (4, 1, 0)
