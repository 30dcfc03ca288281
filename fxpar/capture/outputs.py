"""What leaves the captured graph: the loss first, then (when asked for) every tensor of the model's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpar.capture.adapter import pytree
from fxpar.plans.errors import CaptureError
from fxpar.plans.program import Arg
from fxpar.runtime.binding import key_text

LossFunction = Callable[[Any, tuple[tuple, dict[str, Any]]], Tensor]


def loss_of(output: Any) -> Any:
    """The loss in a model's output: ``output.loss``, ``output["loss"]``, or the output itself; None if absent."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output["loss"] if "loss" in output else None
    return getattr(output, "loss", None)


def is_opaque(value: Any) -> bool:
    """True for an object that is no container of tensors we know (a key-value cache)."""
    return not (value is None or isinstance(value, Tensor | bool | int | float | str | Mapping | list | tuple))


def without_opaque(output: Any) -> Any:
    """The model's output with opaque members (one level deep) replaced by None."""
    if isinstance(output, Mapping):
        if any(is_opaque(value) for value in output.values()):
            kept = {key: None if is_opaque(value) else value for key, value in output.items()}
            return kept if type(output) is dict else type(output)(**kept)
    elif isinstance(output, tuple) and any(is_opaque(value) for value in output):
        return tuple(None if is_opaque(value) else value for value in output)
    return output


class ModelWithLoss(nn.Module):
    """``forward`` returns (loss,), ({"loss": loss},) or (loss, output of the model)."""

    def __init__(self, model: nn.Module, loss: LossFunction | None, keep_output: bool) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.keep_output = keep_output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        if self.loss is not None:
            value = self.loss(output, (args, kwargs))
        else:
            value = loss_of(output)
        if self.keep_output:
            return value, without_opaque(output)
        # so that the loaded model's output has a loss wherever the user's has one
        return (value,) if isinstance(output, Tensor) else ({"loss": value},)


def structure_of(spec: pytree.TreeSpec, leaves: list[Arg]) -> Arg:
    """A pytree structure as plain data (``Program.structure``); takes its leaves from the front of ``leaves``."""
    if spec.is_leaf():
        return leaves.pop(0)
    children = tuple(structure_of(child, leaves) for child in spec.children())
    if spec.type is list:
        return ("list", *children)
    if spec.type is tuple:
        return ("tuple", *children)
    name = f"{spec.type.__module__}.{spec.type.__qualname__}"
    fields = getattr(spec.type, "_fields", None)
    if fields is not None and issubclass(spec.type, tuple):
        return ("object", name, tuple(fields), *children)
    keys = spec.context if spec.type is not None else ()
    if isinstance(keys, list | tuple) and len(keys) == len(children):
        kind: tuple[Arg, ...] = ("dict",) if spec.type is dict else ("object", name)
        return (*kind, tuple(map(str, keys)), *children)
    return ("object", name, tuple(str(i) for i in range(len(children))), *children)


def leaf_paths(spec: pytree.TreeSpec) -> list[str]:
    """Path of every leaf: ``output['logits']``, ``output[0]``."""
    dummy = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    keyed, _ = pytree.tree_flatten_with_path(dummy)
    return ["output" + "".join(map(key_text, path)) for path, _ in keyed]


def constant_leaf(leaf: Any) -> Arg:
    """A non-tensor output as a literal (anything exotic by its repr)."""
    return ("const", leaf if leaf is None or isinstance(leaf, bool | int | float | str) else repr(leaf))


def name_outputs(
    graph_module: fx.GraphModule, out_spec: pytree.TreeSpec, with_loss: bool, keep_output: bool
) -> tuple[list[str], Arg]:
    """Rewrite the graph's outputs as [loss?, detached tensors...]; returns their names and the output structure.

    The loss is named ``"loss"``; a leaf of the output that IS the loss is not returned twice.

    Raises:
        CaptureError: there is no loss, or it is no scalar.
    """
    graph = graph_module.graph
    output_node = next(node for node in graph.nodes if node.op == "output")
    leaves: Sequence[Any] = output_node.args[0]
    loss, rest = leaves[0], list(leaves[1:])
    results: list[fx.Node] = []
    names: list[str] = []
    positions: dict[fx.Node, int] = {}
    with graph.inserting_before(output_node):
        if with_loss:
            results.append(scalar_loss(graph, loss))
            names.append("loss")
            positions[loss] = 0
        structure: Arg = None
        if with_loss:
            alone = keep_output or out_spec.children()[0].is_leaf()
            structure = ("value", 0) if alone else ("object", "fxpar.Output", ("loss",), ("value", 0))
        if keep_output:
            spec = out_spec.children()[1]
            described: list[Arg] = []
            for path, leaf in zip(leaf_paths(spec), rest, strict=True):
                if not isinstance(leaf, fx.Node):
                    described.append(constant_leaf(leaf))
                    continue
                if leaf not in positions:
                    positions[leaf] = len(results)
                    # A clone, because an output must not alias an input or another output.
                    detached = graph.call_function(torch.ops.aten.detach.default, (leaf,))
                    results.append(graph.call_function(torch.ops.aten.clone.default, (detached,)))
                    names.append(path)
                described.append(("value", positions[leaf]))
            structure = structure_of(spec, described)
    output_node.args = (tuple(results),)
    graph_module.recompile()
    return names, structure


def scalar_loss(graph: fx.Graph, loss: Any) -> fx.Node:
    """The loss node as a 0-dim tensor.

    Raises:
        CaptureError: there is no loss, or it has several elements.
    """
    if not isinstance(loss, fx.Node):
        raise CaptureError(
            f"the model's output has no loss (found {loss!r})",
            way_out="give loss(output, inputs) returning a scalar tensor, or pass labels so that the model makes one",
        )
    value = loss.meta.get("val", loss.meta.get("example_value"))
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if value is not None and value.numel() != 1:
        raise CaptureError(
            "the loss is not a scalar",
            numbers=(f"its shape is {list(shape)}",),
            way_out="give loss(output, inputs) that reduces it, for example with .mean()",
        )
    return loss if not shape else graph.call_function(torch.ops.aten.reshape.default, (loss, []))
