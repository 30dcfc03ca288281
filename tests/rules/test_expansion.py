"""Expansions: the same steps on every rank, priced as they run, exact where it is easily lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpar.plans.layout import Shard, whole_dims
from fxpar.plans.mesh import Mesh, parse_mesh
from fxpar.rules.choices import JointChoice, Site, axis_choices, combine
from fxpar.rules.expansion import Exchange, LocalOp, most_sent, only_neighbours, overlap, pieces
from fxpar.rules.localise import expansion_of
from fxpar.rules.lockstep import run_expansions
from fxpar.rules.soundness import Example, call_of_example, example, run_op
from fxpar.rules.virtual import assemble, scatter

torch.set_num_threads(1)


def split(given: Example, mesh: Mesh, dim: int) -> tuple[Site, JointChoice]:
    """The choice that cuts a dim of operand 0 on every axis."""
    call = call_of_example(given, run_op(given.op, given.args, given.tensors))
    site = Site(
        call, tuple(whole_dims(t.shape) for t in given.tensors),
        tuple(None if t is None else whole_dims(t.shape) for t in call.outputs),
    )  # fmt: skip
    (choice,) = (c for c in axis_choices(site) if c.inputs[0] == Shard(dim))
    joint = combine(site, (choice,) * len(mesh.axes), mesh)
    assert joint is not None
    return site, joint


def on_ranks(given: Example, mesh: Mesh, dim: int) -> list[Tensor]:
    site, choice = split(given, mesh, dim)
    rng = torch.Generator().manual_seed(0)
    pieces = [
        scatter(t, d, lay, mesh, rng) for t, d, lay in zip(given.tensors, site.inputs, choice.inputs, strict=True)
    ]
    rows = run_expansions(site, choice, mesh, pieces)
    return [
        assemble([row[o] for row in rows], d, lay, mesh)  # type: ignore[misc]
        for o, (d, lay) in enumerate(zip(site.outputs, choice.outputs, strict=True)) if d is not None
    ]


@pytest.mark.parametrize("mesh", ["2", "3", "8", "2x2"])
def test_every_rank_runs_the_same_steps(mesh: str) -> None:
    """Pieces of 5 elements over 8 ranks: some have none."""
    on = parse_mesh(mesh)
    site, choice = split(example("_softmax", torch.randn(3, 5), -1, False), on, 1)
    rows = [expansion_of(site, choice, on, on.coordinates(rank)) for rank in range(on.world_size)]
    kinds = [[s.op if isinstance(s, LocalOp) else (s.kind, s.axis, s.reduce, s.elements) for s in e.steps]
             for e in rows]
    assert all(k == kinds[0] for k in kinds)
    assert sum(isinstance(s, Exchange) for s in rows[0].steps) == 2 * len(on.axes)


def test_a_softmax_of_large_values_and_of_rows_of_minus_infinity() -> None:
    x = torch.tensor([[1e4, -1e4, 0.0, 1e4], [-float("inf")] * 4, [3e38, -3e38, 0.0, 1.0]])
    for op, rest in (("_softmax", (False,)), ("_safe_softmax", ()), ("_log_softmax", (False,))):
        given = example(op, x, -1, *rest)
        for mesh in ("2", "3"):
            torch.testing.assert_close(
                on_ranks(given, parse_mesh(mesh), 1)[0], run_op(given.op, given.args, given.tensors)[0], equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_norm_far_from_zero_loses_nothing(dtype: torch.dtype) -> None:
    """Mean 1000, deviation 1: E[x^2] - E[x]^2 would have no digit left in float32."""
    x = (torch.randn(16, 768, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1000).to(dtype)
    weight, bias = torch.rand(768).to(dtype), torch.rand(768).to(dtype)
    exact = torch.nn.functional.layer_norm(x.double(), [768], weight.double(), bias.double())
    given = example("native_layer_norm", x, [768], weight, bias, 1e-5)
    alone = run_op(given.op, given.args, given.tensors)[0]
    assert alone is not None
    error = (alone.double() - exact).abs().max()
    for mesh in ("2", "4", "2x2"):
        got = on_ranks(given, parse_mesh(mesh), 1)[0]
        assert (got.double() - exact).abs().max() <= 3 * error + torch.finfo(dtype).eps


def test_the_first_of_equal_values_and_of_nans_wins() -> None:
    x = torch.tensor([[1.0, 5.0, 5.0, 2.0, 5.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1.0, float("nan"), 9.0, float("nan"), 0]])
    for op in ("max.dim", "min.dim", "argmax", "argmin"):
        given = example(op, x, 1)
        whole = run_op(given.op, given.args, given.tensors)
        for mesh in ("2", "3", "8"):
            for got, want in zip(on_ranks(given, parse_mesh(mesh), 1), whole, strict=True):
                torch.testing.assert_close(got, want, equal_nan=True)


def test_windows() -> None:
    assert pieces((3, 0, 2)) == [(0, 3), (3, 3), (3, 5)]
    assert overlap((0, 3), (2, 9)) == (2, 3) and overlap((0, 3), (5, 9)) == (5, 5)
    windows = ((-1, 4), (2, 7), (5, 9))
    assert most_sent((3, 3, 2), windows) == 1 and only_neighbours((3, 3, 2), windows)
    assert not only_neighbours((3, 1, 3), ((0, 5), (3, 4), (4, 7)))
