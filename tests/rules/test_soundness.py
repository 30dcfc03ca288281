"""Every declared rule, run choice by choice on virtual meshes, reproduces its op."""

from __future__ import annotations

import pytest
import torch

from fxpar.judge_calls import Shards, is_empty, is_uneven, piece_lengths
from fxpar.op_check import check_op
from fxpar.plans.layout import REPLICATE, Shard
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.program import Dtype
from fxpar.rule_examples.draw import GENERATORS, Draw
from fxpar.rule_examples.drawn import REAL_ONLY, drawn_call, in_dtype
from fxpar.rule_examples.elementwise import short_name
from fxpar.rules.registry import all_rules
from fxpar.rules.soundness import check_call, example, judged_choices, run_op

torch.set_num_threads(1)
MESHES = tuple(parse_mesh(text) for text in ("2", "3", "2x2"))
OPS = sorted(short_name(rule.op) for rule in all_rules())
EXAMPLES = 60
"""Of every op, in every run of the tests; test_sound_deeper and the README's command judge 2,000."""


def test_every_rule_has_calls() -> None:
    assert not set(OPS) - set(GENERATORS), "rules without a generator of calls"
    assert not set(GENERATORS) - set(OPS), "generators without a rule"


@pytest.mark.parametrize("op", OPS)
def test_sound(op: str) -> None:
    judged = check_op(op, MESHES, EXAMPLES)
    assert not judged.problems, "\n".join(map(str, judged.problems[:5]))
    assert judged.examples >= EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_sound_deeper(op: str) -> None:
    judged = check_op(op, MESHES, 2000, Shards(uneven=True, empty=True))
    assert not judged.problems, "\n".join(map(str, judged.problems[:5]))
    assert judged.examples >= 2000


STEPWISE = sorted(short_name(rule.op) for rule in all_rules() if rule.expand is not None)


@pytest.mark.parametrize("op", [op for op in STEPWISE if not any(word in op for word in REAL_ONLY)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)
def test_steps_of_a_split_row_keep_every_dtype(op: str, dtype: torch.dtype) -> None:
    """A loop that runs in steps goes through values of other dtypes than the op's own: exponentials of integers."""
    found = []
    for turn in range(12):
        given = in_dtype(drawn_call(op, turn), dtype)
        if given is not None:
            found += check_call(given, MESHES[turn % 3], seed=turn, limit=16)
    assert not found, "\n".join(map(str, found[:5]))


def test_draws_hold_rare_sizes_and_other_dtypes() -> None:
    drawn = [drawn_call("add.Tensor", turn) for turn in range(400)]
    dtypes = {t.dtype for given in drawn for t in given.tensors}
    assert dtypes >= {torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.complex64}
    sizes = {size for given in drawn for t in given.tensors for size in t.shape}
    assert sizes >= {0, 1, 2, 3, 4, 5, 6}


def test_a_dtype_argument_follows_its_operands() -> None:
    drawn = [drawn_call("_softmax_backward_data", turn) for turn in range(200)]
    assert {(given.tensors[0].dtype, given.args[3]) for given in drawn} == {
        (torch.float64, Dtype("float64")), (torch.float32, Dtype("float32")), (torch.bfloat16, Dtype("bfloat16")),
    }


@pytest.mark.parametrize("op", sorted(GENERATORS))
def test_a_drawn_call_is_always_the_same_and_runs(op: str) -> None:
    for turn in range(3):
        one, other = drawn_call(op, turn), drawn_call(op, turn)
        assert one.args == other.args
        assert all(map(same, one.tensors, other.tensors))
        run_op(one.op, one.args, one.tensors)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(9) if one.is_floating_point() else one,
                                                    other.nan_to_num(9) if other.is_floating_point() else other)


def test_lengths_of_pieces() -> None:
    mesh = parse_mesh("3")
    assert piece_lengths(((4,), (2,)), (Shard(0),), mesh) == {4, 0}
    assert piece_lengths(((5,), (2,)), (Shard(0),), mesh) == {4, 2}
    assert piece_lengths(((5,), (3,)), (Shard(1),), mesh) == {5}
    assert piece_lengths(((5,), (3,)), (REPLICATE,), mesh) == {15}
    given = next(g for g in (drawn_call("mm", turn) for turn in range(50)) if g.tensors[0].shape == (4, 5))
    seen = {(is_uneven(*ran), is_empty(*ran)) for site, choice, _ in judged_choices(given, mesh)
            if (ran := (site, choice, mesh))}
    assert seen >= {(False, False), (True, False)}


def test_rare_sizes_are_drawn_only_when_wanted() -> None:
    assert {Draw(seed).size() for seed in range(60)} == {2, 3, 4, 5, 6}
    assert {Draw(seed, rare=True).size() for seed in range(200)} == {0, 1, 2, 3, 4, 5, 6}


def test_sums_of_few_bits_may_cancel() -> None:
    """A small sum of large terms is off by more than its own size, by the dtype and not by the rule."""
    half = torch.tensor([2.71, 1.93, -2.5, 3.1, 0.77, -1.3])
    given = example("sum.dim_IntList", torch.cat([half, -half]).reshape(4, 3).to(torch.bfloat16), [0, 1])
    assert not [p for seed in range(20) for mesh in MESHES for p in check_call(given, mesh, seed=seed)]
