"""The private names of torch that capture stands on, in one place.

Two routes to a graph of torch calls with every parameter an attribute: :func:`dynamo_graph` (Python is followed, so
hand-written backwards and hooks are kept) and :func:`exported_graph` (the fallback; its gradients must be checked).
:func:`joint_graph` then traces forward and backward together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo import functional_export
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.graph_module import _get_attr
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BufferAOTInput",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "attribute",
    "dynamo_graph",
    "exported_graph",
    "fake_like",
    "joint_graph",
    "nested_graphs",
    "new_fake_mode",
    "no_dispatch",
    "pytree",
    "wrapped_by_compile",
]

attribute: Callable[[nn.Module, str], Any] = _get_attr


def wrapped_by_compile(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule)


def new_fake_mode() -> FakeTensorMode:
    """Static shapes; real tensors met on the way (module attributes) are taken in as constants."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_like(tensor: Tensor, fake_mode: FakeTensorMode) -> Tensor:
    """A contiguous fake CPU tensor of this shape and dtype; gradients are not tracked."""
    with fake_mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


@contextlib.contextmanager
def _quiet_tracing() -> Any:
    """Vendor kernels off (they would put their own ops into a device-neutral graph), rnn loops unrolled."""
    vendor = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch._dynamo.config.patch(allow_rnn=True):
            yield
    finally:
        torch._C._set_mkldnn_enabled(vendor)


@contextlib.contextmanager
def _without_guards() -> Any:
    """No guard functions: shapes are static and the graph is not called again. They cost a third of the trace."""
    original = functional_export._suggest_or_raise_constraint_violation
    functional_export._suggest_or_raise_constraint_violation = lambda *_: None
    try:
        yield
    finally:
        functional_export._suggest_or_raise_constraint_violation = original


def dynamo_graph(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> fx.GraphModule:
    """One graph of the module's call, or dynamo's error."""
    with _quiet_tracing(), _without_guards():
        try:
            return functional_export._dynamo_graph_capture_for_export(module)(*args, **kwargs)
        finally:
            torch._dynamo.reset()


def exported_graph(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> fx.GraphModule:
    """``torch.export`` without following Python: drops hand-written backwards and hooks."""
    with _quiet_tracing():
        return torch.export.export(module, args, kwargs, strict=False).module()


def flat_signature(graph_module: fx.GraphModule) -> tuple[pytree.TreeSpec, pytree.TreeSpec]:
    """Turn the graph's pytree signature into a flat one; returns the (input, output) structures."""
    pytree_codegen: Any = graph_module.graph._codegen
    structure = pytree_codegen.pytree_info
    graph_module.graph.set_codegen(fx.graph.CodeGen())
    return structure.in_spec, structure.out_spec


def nested_graphs(graph_module: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph and those of its regions (checkpointing, hand-written autograd functions)."""
    return [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]


def joint_graph(
    graph_module: fx.GraphModule, inputs: Sequence[Tensor], decompositions: dict[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """Forward and backward in one functional graph; placeholders and outputs carry descriptors in ``meta["desc"]``."""
    with contextlib.ExitStack() as stack, _quiet_tracing():
        joint = aot_export_joint_with_descriptors(stack, graph_module, tuple(inputs), decompositions=decompositions)
        traced = joint.graph_module
    traced.graph.set_codegen(fx.graph.CodeGen())
    return traced
