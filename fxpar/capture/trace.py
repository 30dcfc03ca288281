"""The steps of capture in order: bind the call, trace, replace attention, trace jointly, lower, simplify, number."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

import fxpar.capture.draws  # noqa: F401  (enters the random ops into the table)
from fxpar.capture import adapter
from fxpar.capture.attention_calls import attention_intercepted, replace_attention
from fxpar.capture.call import Call, bind_call
from fxpar.capture.ctc_calls import ctc_intercepted
from fxpar.capture.decompositions import TABLE
from fxpar.capture.lower import Lowering, op_name, tensor_type
from fxpar.capture.numbering import number_draws, renumber
from fxpar.capture.outputs import LossFunction, ModelWithLoss, name_outputs
from fxpar.capture.refusals import refusal
from fxpar.capture.simplify import pruned, simplify
from fxpar.capture.stand_ins import (
    StandIns,
    evaluating,
    example_fakes,
    on_meta,
    refuse_sparse,
    traceable,
    unwrapped,
)
from fxpar.plans.errors import CaptureError
from fxpar.plans.program import Arg, Input, Node, Output, Program, Ref


def trace(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    loss: LossFunction | None,
    train: bool,
    keep_output: bool,
) -> Program:
    """See :func:`fxpar.capture.capture`."""
    if sparse := refuse_sparse(model):
        raise CaptureError(
            f"sparse gradients are not supported: the embedding {', '.join(map(repr, sparse))} has sparse=True",
            way_out="set sparse=False (the gradient is then dense, and the optimizer touches every row)",
        )
    call = bind_call(unwrapped(model).forward, args, kwargs)
    with ExitStack() as stack:
        if not train:
            stack.enter_context(evaluating(model))
        fake_mode = adapter.new_fake_mode()
        program, fell_back = traced(model, call, loss, train, keep_output, fake_mode)
    if fell_back and train:
        from fxpar.capture.compare import check_gradients

        check_gradients(program, model, args, kwargs, loss, fell_back)
    return program


def traced(
    model: nn.Module,
    call: Call,
    loss: LossFunction | None,
    train: bool,
    keep_output: bool,
    fake_mode: adapter.FakeTensorMode,
) -> tuple[Program, str]:
    """(the program, why dynamo refused when the fallback made it)."""
    with traceable(model, fake_mode, gradients=train) as stand_ins:
        leaves = example_fakes(list(call.leaves), fake_mode)
        args, kwargs = adapter.pytree.tree_unflatten(leaves, call.structure)
        keep_output = keep_output or (not train and loss is None)
        module = ModelWithLoss(stand_ins.model, loss, keep_output)
        with ctc_intercepted():
            graph_module, fell_back = graph_of(module, args, kwargs, on_meta(stand_ins.originals))
        in_spec, out_spec = adapter.flat_signature(graph_module)
        drop_constant_placeholders(graph_module, leaves)
        names, structure = name_outputs(graph_module, out_spec, train or loss is not None, keep_output)
        replace_attention(graph_module)
        try:
            with attention_intercepted(), ctc_intercepted():
                joint = adapter.joint_graph(graph_module, [leaf for leaf in leaves if isinstance(leaf, Tensor)], TABLE)
        except CaptureError:
            raise
        except Exception as error:  # torch raises what it likes here; all of it is about the user's model
            raise refusal(error) from error
        program = lower(joint, graph_module, stand_ins, call, names, structure, train)
    return renumber(pruned(number_draws(simplify(program)))), fell_back


def graph_of(module: nn.Module, args: tuple, kwargs: dict[str, Any], meta: bool) -> tuple[fx.GraphModule, str]:
    """The graph of torch calls, and what dynamo said if the fallback had to make it.

    Raises:
        CaptureError: no route gives one graph, or the fallback could not be checked.
    """
    try:
        return adapter.dynamo_graph(module, args, kwargs), ""
    except CaptureError:
        raise
    except Exception as error:  # every refusal of dynamo is a subclass of something else
        why = refusal(error)
        if "data-dependent" in why.what:
            raise why from error
        if meta:
            note = "the other route drops hand-written backwards; on the meta device it cannot be compared with eager"
            raise refusal(error, note) from error
        try:
            return adapter.exported_graph(module, args, kwargs), str(why)
        except Exception as second:
            if "data-dependent" in (other := refusal(second)).what:
                raise other from second
            raise refusal(error, f"without following Python: {str(second).strip().splitlines()[0]}") from second


def drop_constant_placeholders(graph_module: fx.GraphModule, leaves: Sequence[object]) -> None:
    """Keep one placeholder per tensor leaf, in order."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, leaf in zip(placeholders, leaves, strict=True):
        if not isinstance(leaf, Tensor):
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def lower(
    joint: fx.GraphModule,
    graph_module: fx.GraphModule,
    stand_ins: StandIns,
    call: Call,
    names: list[str],
    structure: Arg,
    train: bool,
) -> Program:
    """The joint FX graph as a Program, still with its aliases and dead nodes."""
    lowering = Lowering(stand_ins.paths)
    value_of_name: dict[str, int] = {}
    for entry in stand_ins.originals:
        learned = entry.kind == "parameter" and entry.tensor.requires_grad
        value = lowering.new_value(tensor_type(entry.tensor))
        lowering.inputs.append(Input(value, entry.kind, entry.names[0], entry.names[1:], learned, entry.persistent))
        value_of_name[entry.names[0]] = value
    inputs = [lowering.add_input(tensor_type(call.leaves[i]), "input", call.paths[i]) for i in call.tensors]
    constant_values: dict[int, int] = {}

    def stored_value(target: str) -> int:
        tensor = adapter.attribute(graph_module, target)
        if id(tensor) in stand_ins.stored:
            return value_of_name[stand_ins.stored[id(tensor)].names[0]]
        if id(tensor) not in constant_values:
            constant_values[id(tensor)] = lowering.add_constant(tensor, target)
        return constant_values[id(tensor)]

    for node in joint.graph.nodes:
        if node.op == "placeholder":
            described = node.meta["desc"]
            if isinstance(described, adapter.ParamAOTInput | adapter.BufferAOTInput):
                lowering.value_of[node] = stored_value(described.target)
            elif isinstance(described, adapter.PlainAOTInput):
                lowering.value_of[node] = inputs[described.idx]
            elif isinstance(described, adapter.TangentAOTInput):
                value = lowering.add_input(tensor_type(node.meta["val"]), "tangent", "loss")
                lowering.value_of[node] = value
                lowering.late.add(value)
            else:
                raise CaptureError(f"the traced graph has an input of unknown meaning: {described}")
        elif node.op == "get_attr":
            attribute = adapter.attribute(joint, node.target)
            if isinstance(attribute, Tensor):
                lowering.value_of[node] = lowering.add_constant(attribute, str(node.target))
        elif node.op == "call_function":
            lowering.lower_call(node)
    outputs = graph_outputs(joint, graph_module, lowering, stand_ins, names, train)
    return lowering.program(outputs, baked=call.baked, call=call.parameters, structure=structure)


def graph_outputs(
    joint: fx.GraphModule,
    graph_module: fx.GraphModule,
    lowering: Lowering,
    stand_ins: StandIns,
    names: list[str],
    train: bool,
) -> list[Output]:
    """Loss, further outputs, new buffers, gradients (summed over the aliases of one parameter), by first name."""
    output_node = next(node for node in joint.graph.nodes if node.op == "output")
    plain: dict[int, Output] = {}
    buffers: list[Output] = []
    gradients: dict[str, list[int]] = {}
    for node, described in zip(output_node.args[0], output_node.meta["desc"], strict=True):
        if not isinstance(node, fx.Node):
            continue
        value = lowering.value_of[node]
        if isinstance(described, adapter.PlainAOTOutput):
            name = names[described.idx]
            plain[described.idx] = Output(value, "loss" if name == "loss" else "output", name)
        elif isinstance(described, adapter.InputMutationAOTOutput):
            buffers.append(Output(value, "buffer", mutated_name(described.mutated_input, graph_module, stand_ins)))
        elif isinstance(described, adapter.GradAOTOutput):
            source = described.grad_of
            if isinstance(source, adapter.ParamAOTInput):
                tensor = adapter.attribute(graph_module, source.target)
                if id(tensor) in stand_ins.stored:
                    gradients.setdefault(stand_ins.stored[id(tensor)].names[0], []).append(value)
        else:
            raise CaptureError(f"the traced graph has an output of unknown meaning: {described}")
    if train and not gradients:
        raise CaptureError(
            "no parameter gets a gradient from the loss",
            way_out="check requires_grad of the parameters and that the loss depends on them",
        )
    ordered = [Output(summed(values, lowering), "gradient", name) for name, values in gradients.items()]
    rank = {e.name: i for i, e in enumerate(lowering.inputs)}
    ordered.sort(key=lambda output: rank[output.name])
    buffers.sort(key=lambda output: rank[output.name])
    return [plain[i] for i in sorted(plain)] + buffers + ordered


def mutated_name(described: Any, graph_module: fx.GraphModule, stand_ins: StandIns) -> str:
    """First name of the buffer that the model writes.

    Raises:
        CaptureError: it writes to an input, a parameter, or a tensor that is no buffer.
    """
    if isinstance(described, adapter.BufferAOTInput):
        tensor = adapter.attribute(graph_module, described.target)
        if id(tensor) in stand_ins.stored:
            return stand_ins.stored[id(tensor)].names[0]
        raise CaptureError(
            f"the model writes to the tensor {described.target}, which is not a buffer",
            way_out="register it with register_buffer",
        )
    what = "a parameter" if isinstance(described, adapter.ParamAOTInput) else "one of its inputs"
    raise CaptureError(
        f"the model writes in place to {what} ({described.expr()})", way_out="clone it before writing to it"
    )


def summed(values: list[int], lowering: Lowering) -> int:
    """One value that is the sum of several."""
    total = values[0]
    for value in values[1:]:
        result = lowering.new_value(lowering.types[total])
        add = op_name(torch.ops.aten.add.Tensor)
        lowering.nodes.append(Node(add, (Ref(total), Ref(value), 1), (result,), "backward"))
        total = result
    return total
