"""What an op does, counted from the shapes of its LOCAL tensors: flops, bytes, and the class of its kernel."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fxpar.cost.compute import Work
from fxpar.plans.dtypes import DTYPE_BYTES
from fxpar.plans.errors import FxparError


class TensorShape(NamedTuple):
    """Shape and dtype ("float32", "bool" ...) of one tensor."""

    shape: tuple[int, ...]
    dtype: str


# Ops that only rename elements, and empty allocations: no kernel runs.
_VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "view_as", "flatten", "unflatten", "alias", "detach",
    "t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "mT", "expand", "expand_as", "broadcast_to",
    "unsqueeze", "squeeze", "select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind", "as_strided",
    "diagonal", "unfold", "view_as_real", "view_as_complex", "real", "imag", "conj", "lift_fresh",
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "sym_size", "sym_numel", "sym_stride",
    "getitem", "hub",
})

# Ops that write an output and do not read the tensor they are given.
_FILLS = frozenset({
    "full", "zeros", "ones", "arange", "scalar_tensor", "linspace", "eye", "rand", "randn", "randint", "randperm",
    "full_like", "zeros_like", "ones_like", "rand_like", "randn_like", "randint_like",
    "new_full", "new_zeros", "new_ones", "fill", "fill_", "zero", "zero_", "uniform", "normal",
})

# Position of the first factor among the tensor inputs; the flops are 2 * outputs * its last dim.
_MATMULS: Mapping[str, int] = {
    "mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "addbmm": 1,
}

# Ops that pick rows of their first input: what they read is as large as what they write.
_GATHERS = frozenset({"embedding", "embedding_block", "index_select", "gather", "gather_block", "index"})

_ATTENTION_FORWARD = frozenset({
    "attention", "attention_block", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
})
_ATTENTION_BACKWARD = frozenset({
    "attention_backward", "attention_block_backward", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
})


def tensor_bytes(tensor: TensorShape) -> int:
    """Bytes of a dense tensor. Raises FxparError for a dtype without a known size."""
    shape, dtype = tensor
    if dtype not in DTYPE_BYTES:
        raise FxparError(f"no size is known for dtype {dtype!r}", way_out=f"known: {', '.join(sorted(DTYPE_BYTES))}")
    return math.prod(shape) * DTYPE_BYTES[dtype]


def work_of(
    op: str,
    inputs: Sequence[TensorShape | None],
    outputs: Sequence[TensorShape | None],
    args: Mapping[str, object],
) -> Work:
    """Flops and bytes of one op.

    Args:
        op: torch's name, "aten.mm.default" or "fxpar.attention.default".
        inputs: its tensor arguments in the order of the schema, None where an optional one is absent.
        outputs: its results, None where one is not produced.
        args: its other arguments by name; read are `is_causal` (attention), `transposed` (convolution) and
            `experts` (routed experts: their global number).

    An op that is not listed is bound by memory: it reads its inputs and writes its outputs once.

    Raises:
        FxparError: a matmul, convolution or attention without the tensors its count needs, or an unknown dtype.
    """
    name = _base_name(op)
    if name in _VIEWS:
        return Work("view", 0, 0, _dtype(outputs, inputs))
    written = _total(outputs)
    if name in _FILLS:
        return Work("memory", 0, written, _dtype(outputs, inputs))
    if name in _GATHERS:
        return Work("memory", 0, 2 * written + _total(inputs[1:]), _dtype(outputs, inputs))
    moved = _total(inputs) + written
    if name in _MATMULS:
        first = _required(op, inputs, _MATMULS[name], "first factor")
        out = _required(op, outputs, 0, "output")
        # addbmm sums over the batch, so its output is smaller than its work.
        batch = first[0][0] if name == "addbmm" else 1
        return Work("matmul", 2 * math.prod(out[0]) * batch * (first[0][-1] if first[0] else 1), moved, first[1])
    if name in ("convolution", "_convolution", "conv1d", "conv2d", "conv3d"):
        image = _required(op, inputs, 0, "input")
        weight = _required(op, inputs, 1, "weight")
        out = _required(op, outputs, 0, "output")
        return Work("conv", _conv_flops(image, weight, out, args), moved, image[1])
    if name == "convolution_backward":
        grad = _required(op, inputs, 0, "grad_output")
        image = _required(op, inputs, 1, "input")
        weight = _required(op, inputs, 2, "weight")
        # One convolution's worth for each of the gradients of input and weight; that of the bias is a sum.
        wanted = sum(output is not None for output in outputs[:2])
        return Work("conv", wanted * _conv_flops(image, weight, grad, args), moved, image[1])
    if name in _ATTENTION_FORWARD:
        return Work("attention", _attention_flops(op, inputs, 0, args), moved, _dtype(inputs, outputs))
    if name in _ATTENTION_BACKWARD:
        # Five products instead of two: the scores again, then one for each of dV, dP, dQ and dK.
        flops = _attention_flops(op, inputs, 1, args) * 5 // 2
        return Work("attention", flops, moved, _dtype(inputs, outputs))
    if name in ("experts", "experts_backward"):
        return _experts_work(op, inputs, outputs, args)
    return Work("memory", 0, moved, _dtype(outputs, inputs))


def _routed_rows(index: tuple[int, ...], held: int, args: Mapping[str, object]) -> int:
    """Slots that go to the experts held here when all experts get as many."""
    total, rows = args.get("experts"), math.prod(index)
    return -(-rows * held // total) if isinstance(total, int) and total > held else rows


def workspace_bytes(op: str, inputs: Sequence[TensorShape | None], args: Mapping[str, object]) -> int:
    """Bytes that an op allocates and frees while it runs, at most; counted for routed experts, whose hidden values are
    many times their result: rows picked, hidden values before and after the activation with their gradients, sums."""
    name = _base_name(op)
    if name not in ("experts", "experts_backward"):
        return 0
    backward = name == "experts_backward"
    x, index, _, up, down = (_required(op, inputs, i + backward, "operand") for i in range(5))
    held, columns, width = up[0]
    hidden = down[0][2]
    rows, element = _routed_rows(index[0], held, args), DTYPE_BYTES[x[1]]
    wide = max(element, 4)
    if backward:
        return rows * ((2 * width + 2 * columns + 6 * hidden) * element + hidden * wide)
    return rows * ((width + columns + 2 * hidden) * element + width * wide) + math.prod(x[0]) * wide


def _experts_work(
    op: str, inputs: Sequence[TensorShape | None], outputs: Sequence[TensorShape | None], args: Mapping[str, object]
) -> Work:
    """The products of the slots that go to the experts held here, balanced: the same share of the slots as of the
    experts. Forward runs the rows through `up` and `down`; backward runs them through `up` again, then each of the two
    in either direction.

    Bytes: every held weight once per product, its rows in and out, and as many rows written sorted and summed back.
    """
    backward = _base_name(op) == "experts_backward"
    x, index, _, up, down = (_required(op, inputs, i + backward, "operand") for i in range(5))
    held, columns, width = up[0]
    hidden, out_width = down[0][2], down[0][1]
    rows = _routed_rows(index[0], held, args)
    per_row = columns * width * (3 if backward else 1) + hidden * out_width * (2 if backward else 1)
    per_row_moved = (columns + width) * (3 if backward else 1) + (hidden + out_width) * (2 if backward else 1)
    element = DTYPE_BYTES[x[1]]
    weights = held * (columns * width * (3 if backward else 1) + hidden * out_width * (2 if backward else 1))
    sorting = 2 * rows * (width + out_width)
    moved = (weights + rows * per_row_moved + sorting) * element + _total([*inputs[:1], x, index]) + _total(outputs[:1])
    return Work("matmul", 2 * rows * per_row, moved, x[1])


def is_view_op(op: str) -> bool:
    """True for an op that only renames elements (or allocates without writing)."""
    return _base_name(op) in _VIEWS


def _base_name(op: str) -> str:
    """The middle of aten.transpose.int; a name without namespace is kept."""
    parts = op.replace("::", ".").replace(":", ".").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _total(tensors: Sequence[TensorShape | None]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors if tensor is not None)


def _dtype(*groups: Sequence[TensorShape | None]) -> str:
    return next((tensor[1] for group in groups for tensor in group if tensor is not None), "float32")


def _required(op: str, tensors: Sequence[TensorShape | None], position: int, role: str) -> TensorShape:
    tensor = tensors[position] if position < len(tensors) else None
    if tensor is None:
        raise FxparError(f"{op} has no {role}, so its work cannot be counted", numbers=f"tensors given: {len(tensors)}")
    return tensor


def _conv_flops(image: TensorShape, weight: TensorShape, out: TensorShape, args: Mapping[str, object]) -> int:
    # The weight is [out, in / groups, *kernel], or [in, out / groups, *kernel] when transposed: either way each
    # element of one side meets weight.shape[1:] elements of the other.
    side = image if args.get("transposed") else out
    return 2 * math.prod(side[0]) * math.prod(weight[0][1:])


def _attention_flops(op: str, inputs: Sequence[TensorShape | None], first: int, args: Mapping[str, object]) -> int:
    """Two products, q k^T over e and p v over v: 2 * b * h * q * k * (e + v), under a causal mask without the pairs
    of rows and later keys: half of a square; of a part of the rows (a split sequence) the last, of a part of the keys
    the first, which have most."""
    query = _required(op, inputs, first, "query")[0]
    key = _required(op, inputs, first + 1, "key")[0]
    value = _required(op, inputs, first + 2, "value")[0]
    if len(query) < 2 or len(key) < 2 or len(value) < 2:
        raise FxparError(f"{op} needs query, key and value of [..., length, size]", numbers=f"query: {query}")
    rows, keys = query[-2], key[-2]
    pairs = 2 * rows * keys
    if args.get("is_causal"):
        pairs -= min(rows, keys) ** 2
    return math.prod(query[:-2]) * pairs * (query[-1] + value[-1])
