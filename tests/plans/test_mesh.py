"""Meshes: ranks and coordinates are inverse, groups partition the ranks, texts are read or refused."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpar.plans.errors import FxparError
from fxpar.plans.mesh import Axis, Mesh, parse_mesh
from tests.plans.draw import meshes


@given(meshes())
def test_coordinates_and_ranks_are_inverse_and_row_major(mesh: Mesh):
    assert mesh.world_size == math.prod(mesh.sizes)
    every = list(itertools.product(*map(range, mesh.sizes)))
    assert [mesh.coordinates(rank) for rank in range(mesh.world_size)] == every
    assert [mesh.rank(coords) for coords in every] == list(range(mesh.world_size))


@given(meshes(), st.data())
def test_groups_partition_the_ranks(mesh: Mesh, data):
    axes = tuple(data.draw(st.sets(st.integers(0, len(mesh.axes) - 1)).map(sorted)))
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert [g[0] for g in groups] == sorted(g[0] for g in groups)
    others = [a for a in range(len(mesh.axes)) if a not in axes]
    for group in groups:
        assert len(group) == math.prod(mesh.sizes[a] for a in axes)
        coords = [mesh.coordinates(rank) for rank in group]
        assert len({tuple(c[a] for a in others) for c in coords}) == 1
        assert [tuple(c[a] for a in axes) for c in coords] == sorted(tuple(c[a] for a in axes) for c in coords)
        assert all(mesh.group(rank, axes) == group for rank in group)


@given(st.lists(st.tuples(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), st.integers(1, 99)), min_size=1,
                max_size=4, unique_by=lambda a: a[0]))
def test_named_axes_are_read_back(axes):
    mesh = Mesh(tuple(Axis(*a) for a in axes))
    assert parse_mesh(str(mesh)) == mesh


@given(st.lists(st.integers(1, 99), min_size=1, max_size=4))
def test_sizes_are_read(sizes):
    assert parse_mesh("x".join(map(str, sizes))).sizes == tuple(sizes)


@pytest.mark.parametrize("text", ["", "0", "-1", "2x", "x2", "2x0", "dp", "dp=", "=2", "dp=0", "dp=2,dp=2", "dp=2,2",
                                  "dp=2 tp=2", "1.5", "2*2", "d p=2", "dp=-2", "\u00b2", "dp=\u00b2", "9" * 5000])
def test_what_is_no_mesh_is_refused(text: str):
    with pytest.raises(FxparError, match="mesh"):
        parse_mesh(text)


@given(st.text(alphabet="0123456789xdpt=, \u00b2\u0663", max_size=12))
def test_any_text_is_a_mesh_or_refused(text: str):
    try:
        mesh = parse_mesh(text)
    except FxparError:
        return
    assert all(a.size >= 1 for a in mesh.axes) and len({a.name for a in mesh.axes}) == len(mesh.axes)
