"""Ops of a traced training step that capture replaces or resolves: rules are never asked about them.

Read from capture's own tables, so that this list cannot fall behind them.
"""

from __future__ import annotations

import operator

import torch

import fxpar.capture.draws  # noqa: F401  (enters the random ops into the table)
from fxpar.capture import lower, simplify
from fxpar.capture.attention_calls import SDPA
from fxpar.capture.decompositions import TABLE
from fxpar.plans.errors import FxparError
from fxpar.rules.factor_rule import torch_op

# torch's kernels of one attention: `_scaled_dot_product_flash_attention_for_cpu`, `..._efficient_attention_backward`
KERNEL = "aten._" + SDPA[1]._schema.name.removeprefix("aten::").removesuffix("_attention")


def replacement(op: str) -> str | None:
    """What capture makes of an op (``"aten.full_like.default"``, ``"py:getitem"``); None when it stays as it is."""
    if op in (f"py:{operator.getitem.__name__}", "_operator.getitem"):
        return "resolved to the result it picks"
    if op in {lower.op_name(entry) for entry in TABLE}:
        return "taken apart while tracing"
    if op in {lower.op_name(entry) for entry in SDPA if isinstance(entry, torch._ops.OpOverload)}:
        return "kept whole as fxpar.attention"
    if op.startswith(KERNEL):
        return "kept whole as fxpar.attention, before torch chooses this kernel"
    if op in lower._READS_STRIDES:
        return f"written as {lower._READS_STRIDES[op]}"
    if op in simplify._FILL_LIKE or op in simplify._FILL_WITH:
        return "written as aten.full"
    if op in simplify._SHAPED and simplify._SHAPED[op] != op:
        return f"written as {simplify._SHAPED[op]}"
    if gives_no_tensor(op):
        return "dropped: it gives no tensor"
    return None


def gives_no_tensor(op: str) -> bool:
    """True for a registered op none of whose results is a tensor (an assertion)."""
    if op.count(".") != 2:
        return False
    try:
        returns = torch_op(op)._schema.returns
    except AttributeError:
        return False  # not registered here: nothing is known of it
    return not any("Tensor" in str(result.type) for result in returns)


def registered(op: str) -> bool:
    """True when this process has the op.

    Raises:
        FxparError: the name is not ``namespace.name.overload``.
    """
    if op.count(".") != 2:
        raise FxparError(f"'{op}' is not the full name of an op", way_out="names are such as aten.mm.default")
    try:
        torch_op(op)
    except AttributeError:
        return False
    return True
