"""A reference interpreter: run a whole program on one device, op by op."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import fxpar.rules.ops  # noqa: F401  (registers fxpar::...)
from fxpar.plans.program import Arg, Constant, Dtype, Program, Ref, refs
from fxpar.rules.factor_rule import torch_op

# A program keeps no strides, and the kernels of these ops on CPUs read memory as though their operands were contiguous
# (wrong numbers, no error) or refuse others. Found by tests/runtime/test_strides.py.
_NEEDS_CONTIGUOUS = frozenset({
    "aten.view_as_complex.default", "aten._weight_norm_interface.default",
    "aten._weight_norm_interface_backward.default", "aten.native_layer_norm.default",
    "aten.native_layer_norm_backward.default", "aten.native_group_norm.default",
    "aten.native_group_norm_backward.default", "aten._fused_rms_norm.default", "aten.nll_loss2d_forward.default",
    "aten.nll_loss2d_backward.default", "aten.max_pool2d_with_indices_backward.default",
    "aten.max_pool3d_with_indices_backward.default", "aten.adaptive_max_pool2d_backward.default",
    "aten.adaptive_max_pool3d_backward.default",
})


@cache
def of_contiguous(op: str) -> Any:
    """The torch op as a function that makes its tensors contiguous first."""
    kernel = torch_op(op)

    def contiguous_call(*args: Any, **named: Any) -> Any:
        return kernel(*(a.contiguous() if isinstance(a, Tensor) else a for a in args), **named)

    contiguous_call._schema = kernel._schema  # type: ignore[attr-defined]
    return contiguous_call


# A program keeps no strides, so a view may meet a tensor it cannot alias.
_STRIDE_FREE = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}


def operator_of(op: str) -> Any:
    """The torch op of ``"namespace.name.overload"``, or a function with its schema that takes tensors of any strides.

    Raises:
        AttributeError: this torch has no such op.
    """
    return of_contiguous(op) if op in _NEEDS_CONTIGUOUS else torch_op(_STRIDE_FREE.get(op, op))


@cache
def device_argument(op: str) -> int | None:
    """Position of the op's ``device`` argument."""
    names = [argument.name for argument in operator_of(op)._schema.arguments]
    return names.index("device") if "device" in names else None


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def concrete(arg: Arg, values: Mapping[int, Any]) -> Any:
    """An argument as torch takes it."""
    if isinstance(arg, Ref):
        return values[arg.id]
    if isinstance(arg, Dtype):
        return torch_dtype(arg.name)
    if isinstance(arg, tuple):
        return [concrete(item, values) for item in arg]
    return arg


def split_arguments(op: str, row: list[Any], device: torch.device | None) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in schema order as (positional, by keyword); a device argument left open becomes ``device``."""
    position = device_argument(op)
    if position is not None and row[position] is None:
        row[position] = device
    schema = operator_of(op)._schema.arguments
    positional = [arg for arg, declared in zip(row, schema, strict=True) if not declared.kwarg_only]
    named = {
        declared.name: arg
        for arg, declared in zip(row, schema, strict=True)
        if declared.kwarg_only and (arg is not None or not declared.has_default_value())
    }
    return positional, named


def call(op: str, args: list[Any], device: torch.device | None) -> Any:
    """Run one op on arguments in schema order; a device argument becomes ``device``."""
    positional, named = split_arguments(op, args, device)
    return operator_of(op)(*positional, **named)


def constant_tensor(constant: Constant, device: torch.device | None = None) -> Tensor:
    """The baked tensor."""
    dtype = torch_dtype(constant.type.dtype)
    if not constant.data:
        return torch.empty(constant.type.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(constant.data), dtype=dtype).reshape(constant.type.shape).to(device)


def run_global(program: Program, values: Mapping[int, Tensor], device: torch.device | None = None) -> list[Tensor]:
    """Run the program on whole tensors.

    Args:
        program: with global shapes, as captured.
        values: a tensor for every input value that is not a constant (tangent and seed included); not written to.
        device: where tensors that an op creates live.

    Returns:
        One tensor per ``program.outputs``.

    Raises:
        KeyError: an input value that a node reads is missing.
    """
    known: dict[int, Any] = dict(values)
    for entry in program.inputs:
        if entry.kind == "constant":
            known[entry.value] = constant_tensor(program.constants[int(entry.name)], device)
    last_use: dict[int, int] = {}
    for index, node in enumerate(program.nodes):
        for arg in node.args:
            for value in refs(arg):
                last_use[value] = index
    kept = {output.value for output in program.outputs}
    with torch.no_grad():
        for index, node in enumerate(program.nodes):
            result = call(node.op, [concrete(arg, known) for arg in node.args], device)
            results = result if isinstance(result, tuple | list) else (result,)
            for value, tensor in zip(node.outputs, results, strict=True):
                if value >= 0:
                    known[value] = tensor
            for arg in node.args:
                for value in refs(arg):
                    if last_use[value] == index and value not in kept:
                        known.pop(value, None)
    return [known[output.value] for output in program.outputs]
