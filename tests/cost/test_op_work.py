import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.cost.compute import Work
from fxpar.cost.op_work import TensorShape, work_of, workspace_bytes
from fxpar.live_bytes import LiveBytes
from fxpar.plans.errors import FxparError
from fxpar.rules.ops.experts import experts, experts_backward

DIMS = st.integers(0, 64)


def f32(*shape):
    return TensorShape(shape, "float32")


@given(DIMS, DIMS, DIMS, DIMS)
def test_matmuls_count_two_flops_a_product(b, m, k, n):
    flops, moved = 2 * m * k * n, 4 * (m * k + k * n + m * n)
    out = [f32(m, n)]
    assert work_of("aten.mm.default", [f32(m, k), f32(k, n)], out, {}) == Work("matmul", flops, moved, "float32")
    assert work_of("aten.addmm.default", [f32(n), f32(m, k), f32(k, n)], out, {}) == \
        Work("matmul", flops, moved + 4 * n, "float32")
    assert work_of("aten.bmm.default", [f32(b, m, k), f32(b, k, n)], [f32(b, m, n)], {}).flops == b * flops
    assert work_of("aten.addbmm.default", [f32(m, n), f32(b, m, k), f32(b, k, n)], out, {}).flops == b * flops
    assert work_of("aten.linear.default", [f32(b, m, k), f32(n, k), None], [f32(b, m, n)], {}).flops == b * flops


def test_convolutions():
    image, weight, out = f32(2, 8, 10, 10), f32(16, 4, 3, 3), f32(2, 16, 10, 10)
    forward = work_of("aten.convolution.default", [image, weight, None], [out], {"groups": 2, "transposed": False})
    assert forward.flops == 2 * (2 * 16 * 10 * 10) * (8 // 2) * 9
    backward = work_of("aten.convolution_backward.default", [out, image, weight], [image, weight, f32(16)], {})
    assert backward.flops == 2 * forward.flops
    only_weight = work_of("aten.convolution_backward.default", [out, image, weight], [None, weight, None], {})
    assert only_weight.flops == forward.flops and only_weight.bytes < backward.bytes
    # Transposed, the roles of input and output swap.
    back = work_of("aten.convolution.default", [out, weight, None], [image], {"transposed": True})
    assert back.flops == forward.flops


@given(DIMS, DIMS, DIMS, DIMS, DIMS)
def test_attention(b, h, q, k, e):
    query, key = f32(b, h, q, e), f32(b, h, k, e)
    inputs = [query, key, key]
    forward = work_of("fxpar.attention.default", inputs, [query, f32(b, h, q)], {"is_causal": False})
    assert forward.kind == "attention" and forward.flops == 4 * b * h * q * k * e
    causal = work_of("fxpar.attention.default", inputs, [query, f32(b, h, q)], {"is_causal": True})
    assert causal.flops == 2 * b * h * (2 * q * k - min(q, k) ** 2) * e
    assert causal.flops <= forward.flops and (q != k or 2 * causal.flops == forward.flops)
    backward = work_of("fxpar.attention_backward.default", [query, *inputs], [query, key, key], {})
    assert 2 * backward.flops == 5 * forward.flops


@pytest.mark.parametrize(
    "name",
    ["view.default", "_unsafe_view.default", "detach.default", "t.default", "alias.default", "transpose.int",
     "expand.default", "split.Tensor", "unbind.int", "select.int", "slice.Tensor", "squeeze.dims",
     "as_strided.default", "view_as_real.default", "py:getitem", "fxpar::hub"],
)
def test_views_do_nothing(name):
    assert work_of(name if ":" in name else f"aten.{name}", [f32(4, 4)], [f32(16)], {}) == Work("view", 0, 0, "float32")


@pytest.mark.parametrize("name", ["clone.default", "_to_copy.default", "cat.default", "gelu.default", "sum.dim_IntList",
                                  "native_layer_norm.default", "slice_backward.default", "unknown.default"])
def test_everything_else_reads_and_writes_once(name):
    work = work_of(f"aten.{name}", [f32(4, 8), None], [TensorShape((4, 8), "bfloat16"), None], {})
    assert work == Work("memory", 0, 4 * 32 + 2 * 32, "bfloat16")


def test_embedding_reads_rows_not_the_table():
    table, ids, out = f32(50000, 64), TensorShape((2, 3), "int64"), f32(2, 3, 64)
    assert work_of("aten.embedding.default", [table, ids], [out], {}).bytes == 2 * 4 * 6 * 64 + 8 * 6
    backward = work_of("aten.embedding_dense_backward.default", [out, ids], [table], {})
    assert backward.bytes == 4 * (6 * 64 + 50000 * 64) + 8 * 6


@pytest.mark.parametrize("name", ["zeros", "full", "arange", "scalar_tensor", "zeros_like"])
def test_fills_write_only(name):
    assert work_of(f"aten.{name}.default", [f32(7)] if name == "zeros_like" else [], [f32(7)], {}).bytes == 28


@given(st.lists(DIMS, max_size=4), st.sampled_from(["mm", "gelu", "view", "zeros", "embedding"]))
def test_counts_are_exact_integers(shape, name):
    work = work_of(f"aten.{name}.default", [f32(*shape), f32(*shape)], [f32(*shape)], {})
    assert type(work.flops) is int and type(work.bytes) is int and 0 <= work.bytes <= 3 * 4 * math.prod(shape)


def test_missing_tensors_and_unknown_dtypes_are_named():
    with pytest.raises(FxparError, match=r"aten\.addmm\.default has no first factor"):
        work_of("aten.addmm.default", [f32(3)], [f32(3, 3)], {})
    with pytest.raises(FxparError, match="float3"):
        work_of("aten.gelu.default", [TensorShape((3,), "float3")], [f32(3)], {})


def experts_operands(tokens, slots, held, width, hidden, columns):
    return [f32(tokens, width), TensorShape((tokens, slots), "int64"), f32(tokens, slots),
            f32(held, columns, width), f32(held, width, hidden)]  # fmt: skip


def test_experts_work_on_their_share_of_the_slots():
    every, some = (experts_operands(64, 2, held, 8, 12, 24) for held in (8, 2))
    whole = work_of("fxpar.experts.default", every, [f32(64, 8)], {"experts": 8})
    part = work_of("fxpar.experts.default", some, [f32(64, 8)], {"experts": 8})
    assert whole.kind == "matmul" and whole.flops == 2 * 128 * (24 * 8 + 12 * 8) == 4 * part.flops
    assert part.bytes < whole.bytes < 4 * part.bytes  # tokens and sums are there whatever is held
    grads = [f32(64, 8), f32(64, 2), every[3], every[4]]
    backward = work_of("fxpar.experts_backward.default", [f32(64, 8), *every], grads, {"experts": 8})
    assert backward.flops == 2 * 128 * (3 * 24 * 8 + 2 * 12 * 8)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_what_experts_allocate_while_they_run_is_bounded(gated, backward):
    torch.manual_seed(0)
    tokens, held, width, hidden = 256, 4, 32, 48
    columns = hidden * (2 if gated else 1)
    x, weight = torch.randn(tokens, width), torch.rand(tokens, 2)
    index = torch.arange(tokens * 2).reshape(tokens, 2) % held
    up, down = torch.randn(held, columns, width), torch.randn(held, width, hidden)
    given = (*((torch.randn(tokens, width),) if backward else ()), x, index, weight, up, down)
    kernel = experts_backward if backward else experts
    with LiveBytes((), given) as live:
        results = kernel(*given, "silu", gated, held, ())
    kept = sum(t.nbytes for t in (results if backward else (results,)))
    shapes = [TensorShape(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in given]
    stated = workspace_bytes(f"fxpar.{kernel.__name__}.default", shapes, {"experts": held})
    assert 0.4 * stated <= live.peak - kept <= 1.1 * stated
    assert workspace_bytes("aten.mm.default", [f32(4, 4), f32(4, 4)], {}) == 0
