"""What a model's forward does, op by op, without tracing: its eager run on fake tensors as a program.

Deep models take seconds this way that take minutes to trace. The ops are what autograd hands to kernels, in order, each
with the layer that was entered last; nothing is simplified. Only good for comparing one run with another.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.capture import adapter
from fxpar.capture.adapter import FakeTensor, TorchDispatchMode, no_dispatch
from fxpar.capture.call import Call
from fxpar.capture.ctc_calls import ctc_intercepted
from fxpar.capture.lower import tensor_type
from fxpar.capture.numbering import renumber
from fxpar.capture.outputs import LossFunction, ModelWithLoss
from fxpar.capture.stacks import Stack
from fxpar.capture.stand_ins import StandIns, example_fakes, traceable
from fxpar.plans.program import Arg, Dtype, Input, Node, Output, Program, Ref, TensorType


class Recorder(TorchDispatchMode):
    """Collects the ops that run; ``layer`` is the name of the layer that was entered last."""

    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()
        self.stored = stand_ins.stored
        self.layer = ""
        self.types: list[TensorType] = []
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.alive: list[Tensor] = []  # ids name tensors only while these live
        self.value_of: dict[int, int] = {}
        self.constants: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tuple(self.plain(arg) for arg in args)
        named = tuple((name, self.plain(arg)) for name, arg in sorted((kwargs or {}).items()))
        results = func(*args, **(kwargs or {}))
        made = results if isinstance(results, tuple | list) else (results,)
        outputs = tuple(self.defined(result) for result in made)
        # an in-place op gives back what it was given
        again = tuple(self.plain(r) if v < 0 else None for r, v in zip(made, outputs, strict=True))
        source = f"grad={torch.is_grad_enabled()}"
        self.nodes.append(Node(str(func), (given, named, again), outputs, "forward", self.layer, source))
        return results

    def defined(self, result: Any) -> int:
        """The number of a new tensor; -1 for one that is known, or is no tensor."""
        if not isinstance(result, Tensor) or id(result) in self.value_of:
            return -1
        return self.number(result)

    def number(self, tensor: Tensor) -> int:
        self.alive.append(tensor)
        self.types.append(tensor_type(tensor))
        self.value_of[id(tensor)] = len(self.types) - 1
        return len(self.types) - 1

    def plain(self, arg: Any) -> Arg:
        if isinstance(arg, Tensor):
            if id(arg) not in self.value_of:
                self.enter(arg)
            return Ref(self.value_of[id(arg)])
        if isinstance(arg, list | tuple):
            return tuple(self.plain(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return Dtype(str(arg))
        return arg if arg is None or isinstance(arg, bool | int | float | str) else repr(arg)

    def enter(self, tensor: Tensor) -> None:
        """A tensor that no op made: a parameter, a buffer, an input or a constant (equal ones are one value)."""
        entry = self.stored.get(id(tensor))
        if entry is None and not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
            name = constant_name(tensor)
            if name in self.constants:
                self.alive.append(tensor)
                self.value_of[id(tensor)] = self.constants[name]
            else:
                self.constants[name] = self.number(tensor)
                self.inputs.append(Input(self.constants[name], "constant", name))
            return
        value = self.number(tensor)
        if entry is None:
            self.inputs.append(Input(value, "input", str(tensor.requires_grad)))
        else:
            first, *ties = entry.names
            self.inputs.append(Input(value, entry.kind, first, tuple(ties), tensor.requires_grad, entry.persistent))

    def program(self) -> Program:
        outputs = (Output(len(self.types) - 1, "loss", "loss"),) if self.types else ()
        ordered = sorted(self.inputs, key=lambda entry: entry.kind not in ("parameter", "buffer"))
        return renumber(Program(tuple(self.types), tuple(ordered), tuple(self.nodes), outputs))


def constant_name(tensor: Tensor) -> str:
    """Type and content of a tensor with values."""
    with no_dispatch():
        plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.detach()
        content = hashlib.sha256(plain.numpy().tobytes()).hexdigest() if tensor.numel() else ""
    return f"{tensor.dtype}{tuple(tensor.shape)} {content}"


@contextlib.contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """What forward assigns to the modules is undone: it would be fake tensors."""
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    tables = [(table, dict(table)) for _, state in before for table in (state["_parameters"], state["_buffers"])]
    try:
        yield
    finally:
        for module, state in before:
            module.__dict__.clear()
            module.__dict__.update(state)
        for table, content in tables:
            table.clear()
            table.update(content)


def op_stream(
    model: nn.Module,
    call: Call,
    loss: LossFunction | None,
    stacks: Sequence[Stack],
    *,
    train: bool,
    keep_output: bool,
) -> Program:
    """The ops of one forward (and loss) of the model as it stands.

    Raises:
        Exception: whatever the model raises on tensors without values.
    """
    fake_mode = adapter.new_fake_mode()
    with contextlib.ExitStack() as undo:
        stand_ins = undo.enter_context(traceable(model, fake_mode, gradients=train))
        undo.enter_context(attributes_restored(stand_ins.model))
        recorder = Recorder(stand_ins)
        leaves = example_fakes(list(call.leaves), fake_mode)
        args, kwargs = adapter.pytree.tree_unflatten(leaves, call.structure)
        for stack in stacks:
            for name, layer in stand_ins.model.get_submodule(stack.path).named_children():
                undo.enter_context(_entered(layer, f"{stack.path}.{name}" if stack.path else name, recorder))
        undo.enter_context(torch.random.fork_rng(devices=[]))
        undo.enter_context(torch.set_grad_enabled(train))
        undo.enter_context(ctc_intercepted())
        undo.enter_context(fake_mode)
        undo.enter_context(recorder)
        ModelWithLoss(stand_ins.model, loss, keep_output)(*args, **kwargs)
    return recorder.program()


@contextlib.contextmanager
def _entered(layer: nn.Module, name: str, recorder: Recorder) -> Iterator[None]:
    def enter(*_: Any) -> None:
        recorder.layer = name

    handle = layer.register_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()
