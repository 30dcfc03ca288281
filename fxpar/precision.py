"""Mixed precision: parameters stored and stepped in float32, computed with in bfloat16, gradients reduced in float32.

The model is captured with bfloat16 parameters and inputs; the program is then given its float32 surface back:

    w (float32, stored) ──to bf16──▶ forward, backward ──▶ dw (bf16) ──to float32──▶ gradient

A sharded parameter is cast before it is gathered, and a gradient's pending sum is cast before it is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpar.plans.program import Dtype, Input, Node, Output, Program, Ref, TensorType, node_inputs

COMPUTE = "bfloat16"
STORED = "float32"


@contextmanager
def parameters_in_bf16(model: nn.Module) -> Iterator[frozenset[str]]:
    """The model with its float32 parameters in bfloat16 for the duration; gives their names."""
    changed: list[tuple[nn.Parameter, torch.Tensor]] = []
    names = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dtype is torch.float32:
            changed.append((parameter, parameter.data))
            parameter.data = parameter.data.to(torch.bfloat16)
            names.add(name)
        elif any(parameter is p for p, _ in changed):
            names.add(name)
    try:
        yield frozenset(names)
    finally:
        for parameter, data in changed:
            parameter.data = data


def inputs_in_bf16(tree: Any) -> Any:
    """float32 tensors of a call in bfloat16."""
    return pytree.tree_map(
        lambda t: t.to(torch.bfloat16) if isinstance(t, torch.Tensor) and t.dtype is torch.float32 else t, tree
    )


def float32_inputs(tree: Any) -> bool:
    """True when the call passes some float32 tensor."""
    return any(isinstance(t, torch.Tensor) and t.dtype is torch.float32 for t in pytree.tree_leaves(tree))


def with_float32_surface(program: Program, parameters: frozenset[str], cast_inputs: bool) -> Program:
    """Give a program captured in bfloat16 float32 parameters, gradients and (``cast_inputs``) inputs.

    Args:
        program: without logical dims.
        parameters: names of the parameters that are float32 outside.
    """
    types = list(program.types)
    inputs: list[Input] = []
    casts: list[Node] = []
    for item in program.inputs:
        wide = (item.kind == "parameter" and item.name in parameters) or (item.kind == "input" and cast_inputs)
        if not wide or types[item.value].dtype != COMPUTE:
            inputs.append(item)
            continue
        types.append(TensorType(types[item.value].shape, STORED))
        outside = len(types) - 1
        module = item.name.rpartition(".")[0] if item.kind == "parameter" else ""
        casts.append(_cast(outside, item.value, COMPUTE, "forward", module))
        inputs.append(msgspec.structs.replace(item, value=outside))
    late: dict[int, list[Node]] = {}
    outputs: list[Output] = []
    for output in program.outputs:
        if output.kind == "gradient" and output.name in parameters and types[output.value].dtype == COMPUTE:
            types.append(TensorType(types[output.value].shape, STORED))
            outside = len(types) - 1
            module = output.name.rpartition(".")[0]
            late.setdefault(output.value, []).append(_cast(output.value, outside, STORED, "backward", module))
            output = msgspec.structs.replace(output, value=outside)
        outputs.append(output)
    nodes = list(casts)
    for node in program.nodes:
        nodes.append(node)
        for value in node.outputs:
            nodes += late.get(value, [])
    return msgspec.structs.replace(
        program, types=tuple(types), inputs=tuple(inputs), nodes=tuple(nodes), outputs=tuple(outputs)
    )


def _cast(source: int, target: int, dtype: str, phase: Any, module: str) -> Node:
    return Node("aten._to_copy.default", (Ref(source), Dtype(dtype), None, None, None, False, None), (target,), phase,
                module, "mixed precision")


def reduced_early(program: Program) -> frozenset[int]:
    """Nodes between a low-precision gradient and its cast to float32: a pending sum must not be reduced before it.

    The cast itself, the views and transposes it reads through, and the additions that join the gradients of several
    uses (of a tied weight).
    """
    producer = {v: i for i, n in enumerate(program.nodes) for v in n.outputs if v >= 0}
    guarded: set[int] = set()
    queue = [
        producer[o.value] for o in program.outputs
        if o.kind == "gradient" and o.value in producer and program.nodes[producer[o.value]].source == "mixed precision"
    ]
    while queue:
        index = queue.pop()
        node = program.nodes[index]
        if index not in guarded and node.op in _PASSES_SUMS:
            guarded.add(index)
            queue += [producer[v] for v in node_inputs(node) if v in producer]
    return frozenset(guarded)


_PASSES_SUMS = frozenset({
    "aten._to_copy.default", "aten.t.default", "aten.transpose.int", "aten.view.default", "aten._unsafe_view.default",
    "aten.detach.default", "aten.alias.default", "aten.permute.default", "fxpar.hub.default", "aten.add.Tensor",
})
