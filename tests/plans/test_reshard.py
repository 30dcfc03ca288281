"""Reshards: chains end where they should, every step moves only along its axis, none costs more than gathering all."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.plans.layout import Dims, Layout, Partial, Replicate, Shard, digits, replicated, valid_layout
from fxpar.plans.mesh import Mesh, parse_mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Input, Output, Program, TensorType
from fxpar.plans.reshard import COLLECTIVES, Step, reshard_steps, same_pieces, step_elements
from fxpar.runtime.virtual import run_virtual
from tests.plans.draw import all_dims, layouts, mesh_of, meshes

torch.set_num_threads(1)


def held(dims: Dims, layout: Layout, mesh: Mesh, rank: int) -> list[int]:
    """Flat positions of the global elements that a rank holds, in its own order."""
    shape = [d.size for row in digits(dims, layout, mesh, (0,) * len(mesh.axes)) for d in row]
    index = torch.arange(int(torch.Size(shape).numel())).reshape(shape)
    flat = [d for row in digits(dims, layout, mesh, mesh.coordinates(rank)) for d in row]
    for position, digit in enumerate(flat):
        index = index.narrow(position, digit.start, digit.length)
    return index.flatten().tolist()


def gather_then_slice(source: Layout, target: Layout, dims: Dims, mesh: Mesh) -> int:
    """Weight of the plain chain: every axis to Replicate, innermost first, then every axis to its target."""
    weight, layout = 0, source
    kinds = {Shard: "all_gather", Partial: "all_reduce"}
    for axis in reversed(range(len(mesh.axes))):
        after = (*layout[:axis], Replicate(), *layout[axis + 1 :])
        if after != layout:
            weight += step_elements(kinds[type(layout[axis])], layout, after, axis, dims, mesh) + 64
        layout = after
    return weight + sum(not isinstance(p, Replicate) for p in target)


def weight(chain: tuple[Step, ...], dims: Dims, mesh: Mesh) -> int:
    return sum(
        step_elements(s.kind, s.before, s.after, s.axis, dims, mesh) + (64 if s.kind in COLLECTIVES else 1)
        for s in chain
    )


@st.composite
def reshards(draw, most_axes=3, pending=True):
    mesh = draw(meshes(most_axes))
    dims = draw(all_dims(empty=True))
    return mesh, dims, draw(layouts(dims, mesh, pending=pending)), draw(layouts(dims, mesh, pending=pending))


@settings(max_examples=300)
@given(reshards())
def test_chains_lead_to_the_target_by_legal_steps(drawn):
    mesh, dims, source, target = drawn
    chain = reshard_steps(source, target, dims, mesh)
    layout = source
    for step in chain:
        assert step.before == layout and valid_layout(step.after, dims)
        changed = [a for a, (p, q) in enumerate(zip(step.before, step.after, strict=True)) if p != q]
        assert changed == [step.axis]
        check_step(step, dims, mesh)
        layout = step.after
    assert layout == target
    assert weight(chain, dims, mesh) <= gather_then_slice(source, target, dims, mesh)


def check_step(step: Step, dims: Dims, mesh: Mesh) -> None:
    """What a rank holds after the step, some rank of its group held before it."""
    old, new = step.before[step.axis], step.after[step.axis]
    for group in mesh.groups((step.axis,)):
        before = [held(dims, step.before, mesh, rank) for rank in group]
        after = [held(dims, step.after, mesh, rank) for rank in group]
        together = sorted(i for piece in before for i in piece)
        match step.kind:
            case "all_gather":
                assert all(sorted(piece) == together for piece in after)
            case "slice" | "reduce_scatter":
                assert sorted(i for piece in after for i in piece) == sorted(before[0])
                assert isinstance(new, Shard)
            case "all_to_all":
                assert sorted(i for piece in after for i in piece) == together
            case "all_reduce" | "to_partial":
                assert after == before
                assert isinstance(old, Partial) != isinstance(new, Partial)
            case "alias":
                assert after == before
            case _:
                raise AssertionError(step.kind)


@given(reshards())
def test_nothing_to_do_is_no_step(drawn):
    mesh, dims, source, _ = drawn
    assert reshard_steps(source, source, dims, mesh) == ()


@settings(max_examples=300)
@given(reshards(), st.integers(0, 2**31))
def test_the_chain_carried_out_gives_the_blocks_of_the_target(drawn, seed):
    """A program without nodes: the value enters in one layout and leaves in the other, on virtual ranks."""
    mesh, dims, source, target = drawn
    kind = TensorType(tuple(torch.Size([*map(_size, dims)])), "float64")
    program = Program((kind,), (Input(0, "input", "x"),), (), (Output(0, "output", "x"),), (dims,))
    value = torch.randn(kind.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    result = run_virtual(program, Decisions(mesh, (), (source,), (target,)), {0: value})
    assert torch.equal(result.outputs[0], value)
    assert result.disagreement == (0.0,)
    for rank in range(mesh.world_size):
        if not any(isinstance(p, Partial) for p in target):
            piece = result.pieces[0][rank]
            assert piece.flatten().tolist() == value.flatten()[held(dims, target, mesh, rank)].tolist()


def _size(atoms: tuple[int, ...]) -> int:
    return int(torch.Size(atoms).numel())


def test_some_chains_by_name():
    mesh = parse_mesh("4")
    dims = ((8, 16), (8,))

    def kinds(a, b, on=mesh):
        return [s.kind for s in reshard_steps(a, b, dims, on)]

    assert kinds((Partial("sum"),), (Replicate(),)) == ["all_reduce"]
    assert kinds((Partial("sum"),), (Shard(0),)) == ["reduce_scatter"]
    assert kinds((Shard(0),), (Shard(1),)) == ["all_to_all"]
    assert kinds((Shard(0),), (Shard(0, 0, 2),)) == ["alias"]  # 8 rows of 16, or 128 rows: 4 equal parts either way
    assert kinds((Replicate(),), (Shard(0, 1),)) == ["slice"]
    assert kinds((Replicate(),), (Partial("sum"),)) == ["to_partial"]
    square = parse_mesh("2x2")
    nested = (Shard(0), Shard(0))
    assert kinds(nested, replicated(square), square) == ["all_gather", "all_gather"]
    assert [s.axis for s in reshard_steps(nested, replicated(square), dims, square)] == [1, 0]


def test_runs_that_start_together_are_the_same_pieces_only_where_they_divide():
    for atoms, ranks in [((8, 3), 4), ((6, 2), 4), ((3, 4), 2), ((4, 4), 4), ((2, 2, 2), 2)]:
        dims, mesh = (atoms,), mesh_of([ranks])
        short, long = Shard(0, 0, 1), Shard(0, 0, len(atoms))
        equal = all(
            held(dims, (short,), mesh, r) == held(dims, (long,), mesh, r) for r in range(ranks)
        )
        assert same_pieces(short, long, dims, ranks) <= equal
        assert same_pieces(short, long, dims, ranks) == (atoms[0] % ranks == 0)
    assert not same_pieces(Shard(0, 0), Shard(1, 0), ((4,), (4,)), 2)
    assert not same_pieces(Shard(0, 0, 2), Shard(0, 1), ((4, 4),), 2)


@pytest.mark.parametrize("bad", [(Shard(0, 1),), (Shard(1),), (Shard(0, 0, 2),)])
def test_layouts_that_do_not_fit_are_refused(bad):
    with pytest.raises(ValueError, match="no reshard"):
        reshard_steps((Replicate(),), bad, ((4,),), parse_mesh("2"))


PROCESS = """
import random
from fxpar.plans.reshard import reshard_steps
from fxpar.plans.layout import *
from tests.plans.draw import places, mesh_of
rng = random.Random(5)
for _ in range(150):
    mesh = mesh_of([rng.choice([2, 3, 4]) for _ in range(rng.randint(1, 3))])
    dims = tuple(tuple(rng.choice([2, 3, 4, 8]) for _ in range(rng.randint(1, 3))) for _ in range(2))
    options = [REPLICATE, PARTIAL_SUM, *places(dims)]
    two = [tuple(rng.choice(options) for _ in mesh.axes) for _ in range(2)]
    if all(valid_layout(layout, dims) for layout in two):
        print(reshard_steps(*two, dims, mesh))
"""


def test_chains_do_not_depend_on_the_process(repository):
    texts = [
        subprocess.run(
            [sys.executable, "-c", PROCESS], env={**os.environ, "PYTHONHASHSEED": str(seed)}, cwd=repository,
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert texts[0] == texts[1] and texts[0].count("Step(") > 100
