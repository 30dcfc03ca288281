"""Which choices an axis has: the ones the field knows, and none of the ones wrongly claimed of such systems."""

from __future__ import annotations

import pytest
import torch

from fxpar.plans.layout import PARTIAL_SUM, REPLICATE, Dims, Partial, Shard, whole_dims
from fxpar.plans.mesh import parse_mesh
from fxpar.rules.choices import Choice, Site, axis_choices, choice_by_names, joint_choices
from fxpar.rules.factor_rule import Call
from fxpar.rules.localise import local_call
from fxpar.rules.soundness import Example, call_of_example, example, run_op


def call_of(given: Example) -> Call:
    return call_of_example(given, run_op(given.op, given.args, given.tensors))


def site_of(given: Example, inputs: tuple[Dims, ...] | None = None, outputs: tuple[Dims, ...] | None = None) -> Site:
    call = call_of(given)
    return Site(
        call,
        inputs or tuple(whole_dims(t.shape) for t in call.inputs),
        outputs or tuple(None if t is None else whole_dims(t.shape) for t in call.outputs),
    )


def choices(given: Example, **dims: tuple[Dims, ...]) -> tuple[Choice, ...]:
    return axis_choices(site_of(given, **dims))


def with_inputs(found: tuple[Choice, ...], *inputs: object) -> list[Choice]:
    return [c for c in found if c.inputs == inputs]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def test_a_contracted_dim_makes_a_product_pending_and_rows_by_columns_do_not_exist() -> None:
    found = choices(example("mm", ones(4, 6), ones(6, 8)))
    assert [c.outputs for c in with_inputs(found, Shard(1), Shard(0))] == [(PARTIAL_SUM,)]
    assert not with_inputs(found, Shard(0), Shard(1))


def attention(heads: int = 4, shared: int = 4, **more: object) -> Example:
    q, k = ones(2, heads, 3, 8), ones(2, shared, 5, 8)
    rest = dict(mask=None, seed=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, op_id=0)
    rest["geometry"] = rest["rows"] = []
    return example("fxpar::attention", q, k, k, **{**rest, **more})


def test_attention_splits_batch_heads_query_rows_and_keys_but_not_the_head_dim() -> None:
    found = choices(attention())
    assert with_inputs(found, Shard(0), Shard(0), Shard(0))
    assert with_inputs(found, Shard(1), Shard(1), Shard(1))
    assert with_inputs(found, Shard(2), REPLICATE, REPLICATE)
    assert not any(Shard(3) in c.inputs[:2] for c in found)
    # parts of the keys need the statistics of all: never one local call, and what comes out is a summand
    by_keys = [c for c in found if c.inputs[1] == Shard(2)]
    assert by_keys and all(c.expands and c.outputs[0] == PARTIAL_SUM for c in by_keys)


def test_grouped_heads_split_by_group_or_by_query_head_within_a_group() -> None:
    given = attention(heads=6, shared=2, enable_gqa=True)
    heads = ((2,), (2, 3), (3,), (8,))
    found = choices(
        given,
        inputs=(heads, ((2,), (2,), (5,), (8,)), ((2,), (2,), (5,), (8,))),
        outputs=(heads, ((2,), (2, 3), (3,))),
    )
    assert with_inputs(found, Shard(1, 0), Shard(1), Shard(1))
    assert with_inputs(found, Shard(1, 1), REPLICATE, REPLICATE)


def test_a_bias_is_added_once_where_the_contracted_dim_is_split() -> None:
    found = choices(example("addmm", ones(8), ones(4, 6), ones(6, 8)))
    assert with_inputs(found, PARTIAL_SUM, Shard(1), Shard(0))
    assert not with_inputs(found, REPLICATE, Shard(1), Shard(0))
    # pending products alone would leave the bias once per rank
    assert not with_inputs(found, REPLICATE, PARTIAL_SUM, REPLICATE)


def test_a_number_makes_a_sum_affine() -> None:
    assert not [c for c in choices(example("add.Tensor", ones(4, 6), 1.0)) if PARTIAL_SUM in c.inputs]
    assert with_inputs(choices(example("add.Tensor", ones(4, 6), ones(6))), PARTIAL_SUM, PARTIAL_SUM)
    assert not with_inputs(choices(example("add.Tensor", ones(4, 6), ones(6))), PARTIAL_SUM, REPLICATE)


@pytest.mark.parametrize(("value", "passes"), [(0, True), (1.0, False), (float("-inf"), False)])
def test_masking_passes_pending_sums_only_with_zero(value: float, passes: bool) -> None:
    found = choices(example("masked_fill.Scalar", ones(4), torch.tensor([True, False, True, False]), value))
    assert bool(with_inputs(found, PARTIAL_SUM, REPLICATE)) is passes


@pytest.mark.parametrize(
    ("source", "target", "passes"),
    [
        (torch.float32, torch.float64, True),
        (torch.float64, torch.float32, False),
        (torch.float64, torch.int64, False),
        (torch.bool, torch.float64, False),
        (torch.bfloat16, torch.float32, True),
    ],
)
def test_a_cast_passes_pending_sums_only_when_it_loses_nothing(
    source: torch.dtype, target: torch.dtype, passes: bool
) -> None:
    found = choices(example("_to_copy", ones(4).to(source), dtype=target))
    assert bool(with_inputs(found, PARTIAL_SUM)) is passes


def test_a_maximum_is_pending_as_a_maximum_and_never_over_an_empty_piece() -> None:
    given = example("amax", ones(3, 4), [0])
    (split,) = with_inputs(choices(given), Shard(0))
    assert split.outputs == (Partial("max"),)
    site = site_of(given)
    assert choice_by_names(site, (split.name,), parse_mesh("3")) is not None
    assert choice_by_names(site, (split.name,), parse_mesh("4")) is None
    assert choice_by_names(site, (split.name,) * 2, parse_mesh("2x2")) is None


@pytest.mark.parametrize("op", ["cumprod", "sort"])
def test_an_order_along_a_dim_keeps_it_whole(op: str) -> None:
    found = choices(example(op, ones(4, 6), -1))
    assert with_inputs(found, Shard(0)) and not with_inputs(found, Shard(1))


@pytest.mark.parametrize(("op", "word"), [("cumsum", "running"), ("_softmax", "row")])
def test_a_dim_that_takes_several_steps_says_so(op: str, word: str) -> None:
    given = example(op, ones(4, 6), -1, *((False,) if op == "_softmax" else ()))
    (plain,), (split,) = (with_inputs(choices(given), Shard(d)) for d in (0, 1))
    assert plain.expands == "" and split.expands == word and split.outputs == (Shard(1),)
    joint = choice_by_names(site_of(given), (plain.name, split.name), parse_mesh("2x2"))
    assert joint is not None and joint.expands == ("", word)
    both = choice_by_names(site_of(given), (split.name, split.name), parse_mesh("2x2"))
    assert (both is None) is (op == "cumsum")  # running sums: one axis only


def test_positions_are_made_whole_on_every_rank() -> None:
    assert [c.name for c in choices(example("arange", 8))] == ["."]


def test_a_view_keeps_the_atoms_that_nest_and_no_others() -> None:
    nested = choices(example("view", ones(6, 4), (3, 8)), inputs=(((3, 2), (4,)),), outputs=(((3,), (2, 4)),))
    assert {c.inputs[0] for c in nested} >= {Shard(0, 0), Shard(0, 1), Shard(1)}
    crossed = choices(example("view", ones(20, 9), (30, 6)), inputs=(((10, 2), (9,)),), outputs=(((10, 3), (6,)),))
    assert {c.inputs[0] for c in crossed if isinstance(c.inputs[0], Shard)} == {Shard(0, 0)}


def test_thirds_of_a_fused_projection_split_inside_each_third() -> None:
    given = example("slice.Tensor", ones(4, 12), 1, 4, 8)
    site = site_of(given, (((4,), (3, 4)),), (((4,), (4,)),))
    split = next(c for c in axis_choices(site) if c.inputs == (Shard(1, 1),))
    joint = choice_by_names(site, (split.name,), parse_mesh("2"))
    assert joint is not None
    # two of four columns of each third are here: the middle third starts at 2
    assert local_call(site, joint, parse_mesh("2"), (1,))[1][2:4] == (2, 4)


def test_a_split_table_looks_up_the_rows_it_holds() -> None:
    given = example("embedding", ones(7, 4), torch.tensor([[0, 6], [3, 3]]))
    site = site_of(given)
    split = next(c for c in axis_choices(site) if c.inputs == (Shard(0), REPLICATE))
    assert split.outputs == (PARTIAL_SUM,)
    joint = choice_by_names(site, (split.name,), parse_mesh("2"))
    assert joint is not None
    op, args = local_call(site, joint, parse_mesh("2"), (1,))
    assert (op, args[2]) == ("fxpar.embedding_block.default", (7, 4, 3))


def test_a_run_and_a_loop_inside_it_are_not_cut_by_two_axes() -> None:
    site = site_of(example("relu", ones(8)), (((2, 4),),), (((2, 4),),))
    names = {c.names for c in joint_choices(site, parse_mesh("2x2"))}
    assert ("f0", "f1") in names and ("f0+2", "f0+2") in names
    assert ("f0+2", "f0") not in names and ("f1", "f0+2") not in names


def test_an_op_without_a_rule_is_computed_whole() -> None:
    call = Call("aten.erfinv_.default", (), (), ())
    assert [c.name for c in axis_choices(Site(call, (), ()))] == ["."]


def without_steps(found: tuple[Choice, ...]) -> list[Choice]:
    """Choices of one local call a rank: no expansion exchanges anything."""
    return [c for c in found if not c.expands]


@pytest.mark.parametrize(
    "given",
    [
        example("relu", ones(4, 6)), example("exp", ones(4, 6)), example("abs", ones(4, 6)),
        example("gelu", ones(4, 6)), example("rsqrt", ones(4, 6)), example("pow.Tensor_Scalar", ones(4, 6), 2.0),
        example("amax", ones(4, 6), [1]), example("argmax", ones(4, 6), 1), example("sort", ones(4, 6)),
        example("linalg_vector_norm", ones(4, 6), 2, [1]), example("var.correction", ones(4, 6), [1], correction=1),
        example("_softmax", ones(4, 6), 1, False), example("logsumexp", ones(4, 6), [1]),
        example("native_layer_norm", ones(4, 6), [6], None, None, 1e-5),
        example("max_pool2d_with_indices", ones(1, 2, 4, 4), [2, 2]), example("eq.Tensor", ones(4), ones(4)),
        example("maximum", ones(4), ones(4)),
    ],
    ids=lambda given: given.op,
)
def test_nothing_but_linear_ops_takes_a_pending_sum(given: Example) -> None:
    assert not [c for c in choices(given) if PARTIAL_SUM in c.inputs]


@pytest.mark.parametrize("op", ["mul.Tensor", "mm"])
def test_a_product_takes_one_pending_factor_and_never_two(op: str) -> None:
    found = choices(example(op, ones(4, 4), ones(4, 4)))
    assert with_inputs(found, PARTIAL_SUM, REPLICATE) and with_inputs(found, REPLICATE, PARTIAL_SUM)
    assert not with_inputs(found, PARTIAL_SUM, PARTIAL_SUM)


def test_a_quotient_is_linear_in_the_dividend_alone() -> None:
    found = choices(example("div.Tensor", ones(4), ones(4)))
    assert with_inputs(found, PARTIAL_SUM, REPLICATE) and not [c for c in found if c.inputs[1] == PARTIAL_SUM]


def test_shard_0_of_a_weight_is_column_parallel_stored_as_out_in_and_row_parallel_as_in_out() -> None:
    x, stored = ones(4, 6), ones(8, 6)  # torch's layout: [out, in]
    (turned,) = with_inputs(choices(example("t", stored)), Shard(0))
    assert turned.outputs == (Shard(1),)
    (columns,) = [c for c in choices(example("mm", x, ones(6, 8))) if c.inputs[1] == Shard(1)]
    assert (columns.inputs[0], columns.outputs) == (REPLICATE, (Shard(1),))
    (rows,) = [c for c in choices(example("mm", x, ones(6, 8))) if c.inputs[1] == Shard(0)]
    assert (rows.inputs[0], rows.outputs) == (Shard(1), (PARTIAL_SUM,))


def test_means_of_pieces_are_not_averaged() -> None:
    found = without_steps(choices(example("mean.dim", ones(5, 4), [0])))
    assert with_inputs(found, Shard(1)) and not with_inputs(found, Shard(0))


@pytest.mark.parametrize("op", ["argmax", "max.dim", "median.dim"])
def test_places_of_extremes_are_not_those_of_pieces(op: str) -> None:
    found = without_steps(choices(example(op, ones(4, 6), 1)))
    assert with_inputs(found, Shard(0)) and not with_inputs(found, Shard(1))


def test_padding_idx_names_a_row_of_the_whole_table() -> None:
    given = example("embedding_dense_backward", ones(5, 4), torch.tensor([0, 1, 5, 5, 2]), 6, 5, False)
    site = site_of(given)
    split = next(c for c in axis_choices(site) if c.outputs == (Shard(0),))
    joint = choice_by_names(site, (split.name,), parse_mesh("2"))
    assert joint is not None
    op, args = local_call(site, joint, parse_mesh("2"), (1,))
    assert (op, args[2:]) == ("fxpar.embedding_block_backward.default", ((6, 3, 3), 5))


def test_a_split_convolution_counts_its_own_groups() -> None:
    given = example("convolution", ones(2, 8, 5, 5), ones(8, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 4)
    site = site_of(given, (((2,), (4, 2), (5,), (5,)), ((4, 2), (2,), (3,), (3,))), (((2,), (4, 2), (5,), (5,)),))
    split = next(c for c in axis_choices(site) if c.inputs == (Shard(1), Shard(0)))
    joint = choice_by_names(site, (split.name,), parse_mesh("2"))
    assert joint is not None
    assert local_call(site, joint, parse_mesh("2"), (1,))[1][-1] == 2


def test_space_is_not_cut_where_windows_overlap_and_no_rows_are_exchanged() -> None:
    given = example("convolution", ones(2, 8, 6, 6), ones(8, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    cut = {p.dim for c in without_steps(choices(given)) if isinstance(p := c.inputs[0], Shard)}
    assert cut == {0, 1}


def test_masks_of_pieces_are_the_pieces_of_the_mask() -> None:
    x, seed = ones(8, 6), torch.tensor(3)
    given = example("fxpar::dropout", x, seed, 0.5, 7, [8, 0, 8, 6, 0, 6])
    (whole, *_) = run_op(given.op, given.args, given.tensors)
    site = site_of(given)
    joint = choice_by_names(site, (with_inputs(axis_choices(site), Shard(0), REPLICATE)[0].name,), parse_mesh("2"))
    assert whole is not None and joint is not None
    parts = []
    for rank in range(2):
        op, args = local_call(site, joint, parse_mesh("2"), (rank,))
        parts.append(run_op(op, args, (x[4 * rank : 4 * rank + 4], seed))[0])
    assert torch.equal(torch.cat(parts), whole) and not torch.equal(parts[0], parts[1])
