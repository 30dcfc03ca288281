"""FX joint graph -> Program: values numbered, arguments aligned with schemas, multi-result nodes without getitem."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from fxpar.capture.origin import origin, stack_of
from fxpar.plans.errors import CaptureError
from fxpar.plans.program import Arg, Constant, Dtype, Input, Node, Output, Program, Ref, TensorType, refs

LARGEST_CONSTANT = 1 << 20
InputKind: TypeAlias = Literal["parameter", "buffer", "constant", "input", "tangent", "seed"]
_DEVICE_ONLY = {"device", "layout", "memory_format", "pin_memory", "generator", "non_blocking"}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_type(value: Tensor) -> TensorType:
    return TensorType(tuple(int(size) for size in value.shape), dtype_name(value.dtype))


def op_name(op: torch._ops.OpOverload) -> str:
    return str(op) if op._overloadname != "default" or str(op).endswith("default") else f"{op}.default"


def constant_of(value: Tensor, name: str) -> Constant:
    """The tensor's values as little-endian bytes.

    Raises:
        CaptureError: it is larger than 1 MiB or has no values.
    """
    if value.device.type == "meta" or isinstance(value, torch._subclasses.FakeTensor):
        raise CaptureError(
            f"the tensor {name} is used by the model but is neither a parameter nor a buffer, and has no values",
            way_out="register it with register_buffer, or capture a model that is not on the meta device",
        )
    size = value.numel() * value.element_size()
    if size > LARGEST_CONSTANT:
        raise CaptureError(
            f"the tensor {name} would be baked into the program",
            numbers=(f"it has {size} bytes, the limit is {LARGEST_CONSTANT}",),
            way_out="register it with register_buffer, or pass it as an input",
        )
    raw = value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.numel() else torch.empty(0)
    return Constant(tensor_type(value), raw.numpy().tobytes() if value.numel() else b"")


@dataclass
class Lowering:
    """Values, types, nodes and constants met so far; ``value_of[node]`` is an id or one per result."""

    paths: dict[int, str]
    types: list[TensorType] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    value_of: dict[fx.Node, Any] = field(default_factory=dict)
    origins: dict[int, tuple[str, str]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)

    def new_value(self, kind: TensorType) -> int:
        self.types.append(kind)
        return len(self.types) - 1

    def add_input(self, type: TensorType, kind: InputKind, name: str) -> int:
        value = self.new_value(type)
        self.inputs.append(Input(value, kind, name))
        return value

    def add_constant(self, tensor: Tensor, name: str) -> int:
        constant = constant_of(tensor, name)
        self.constants.append(constant)
        index = str(len(self.constants) - 1)
        return self.add_input(constant.type, "constant", index)

    def argument(self, arg: Any, where: str) -> Arg:
        """One schema argument as plain data."""
        if isinstance(arg, fx.Node):
            if arg not in self.value_of:
                raise CaptureError(f"an op reads {arg.name}, which is no tensor", where=where)
            return Ref(self.value_of[arg])
        if isinstance(arg, torch.dtype):
            return Dtype(dtype_name(arg))
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        if isinstance(arg, list | tuple | torch.Size):
            return tuple(self.argument(item, where) for item in arg)
        if isinstance(arg, torch.SymInt):
            raise CaptureError("a size that depends on the data", where=where, way_out=SHAPE_WAY_OUT)
        raise CaptureError(f"an op takes the constant {arg!r}, which a program cannot hold", where=where)

    def arguments(self, node: fx.Node, op: torch._ops.OpOverload, where: str) -> tuple[Arg, ...]:
        """Arguments in schema order, defaults filled in, everything about devices dropped."""
        result: list[Arg] = []
        for position, parameter in enumerate(op._schema.arguments):
            if parameter.name in _DEVICE_ONLY:
                result.append(None)
            elif position < len(node.args):
                result.append(self.argument(node.args[position], where))
            elif parameter.name in node.kwargs:
                result.append(self.argument(node.kwargs[parameter.name], where))
            else:
                default = parameter.default_value
                if "ScalarType" in str(parameter.real_type) and isinstance(default, int):
                    default = None
                result.append(self.argument(default, where))
        return tuple(result)

    def lower_call(self, node: fx.Node) -> None:
        """Append one op call, or resolve a getitem."""
        if node.target is operator.getitem:
            source, index = node.args
            if isinstance(source, fx.Node):
                self.value_of[node] = self.value_of[source][index]
            return
        module, source_line = origin(node.meta, self.paths)
        where = place(source_line, module)
        op: Any = node.target
        refuse(op, where)
        value_or_values: Any = node.meta.get("val")
        several = isinstance(value_or_values, tuple | list)
        results = tuple(value_or_values) if several else (value_or_values,)
        for result in results:
            refuse_result(op, result, where)
        if not any(isinstance(result, Tensor) for result in results):
            return
        args = self.arguments(node, op, where)
        if not any(True for arg in args for _ in refs(arg)) and isinstance(results[0], Tensor):
            args = with_dtype(op, args, dtype_name(results[0].dtype))
        name = op_name(op)
        if name in _READS_STRIDES:
            name, args = by_position(name, args, node.all_input_nodes[0].meta.get("val"), where)
        used = [value for arg in args for value in refs(arg)]
        if not stack_of(node.meta):
            module, source_line = self.inherited(used, source_line)
        backward = str(node.meta.get("partitioner_tag", "")).endswith("backward") or any(v in self.late for v in used)
        outputs: list[int] = []
        for result in results:
            value = self.new_value(tensor_type(result)) if isinstance(result, Tensor) else -1
            outputs.append(value)
            if value >= 0:
                self.origins[value] = (module, source_line)
                if backward:
                    self.late.add(value)
        self.value_of[node] = outputs if several else outputs[0]
        self.nodes.append(
            Node(name, args, tuple(outputs), "backward" if backward else "forward", module, source_line)
        )

    def inherited(self, used: Sequence[int], source_line: str) -> tuple[str, str]:
        """Nodes without a module of their own (sums of gradients) belong where their last operand does: of several
        gradients of one value, the one that is computed last comes from the same layer as the value."""
        module, line = next((self.origins[v] for v in reversed(used) if any(self.origins.get(v, ()))), ("", ""))
        return module, source_line or line

    def program(self, outputs: Sequence[Output], **rest: Any) -> Program:
        return Program(
            tuple(self.types),
            tuple(self.inputs),
            tuple(self.nodes),
            tuple(outputs),
            constants=tuple(self.constants),
            **rest,
        )


def with_dtype(op: torch._ops.OpOverload, args: tuple[Arg, ...], dtype: str) -> tuple[Arg, ...]:
    """A creation op's arguments with the dtype written out: torch's default may be another where the plan runs."""
    return tuple(
        Dtype(dtype) if arg is None and parameter.name == "dtype" else arg
        for arg, parameter in zip(args, op._schema.arguments, strict=True)
    )


_READS_STRIDES = {
    "aten.as_strided.default": "fxpar.as_strided.default",
    "aten.as_strided_scatter.default": "fxpar.as_strided_scatter.default",
}


def by_position(name: str, args: tuple[Arg, ...], operand: Any, where: str) -> tuple[str, tuple[Arg, ...]]:
    """An op that reads its operand's memory, as one that counts elements row-major: the same when it is contiguous.

    Raises:
        CaptureError: the operand is not contiguous.
    """
    if not (isinstance(operand, Tensor) and operand.is_contiguous() and operand.storage_offset() == 0):
        raise CaptureError(
            f"{name} reads the memory of a tensor that is not contiguous",
            where=where,
            way_out="call contiguous() on it first, or use reshape, unfold or indexing",
        )
    return _READS_STRIDES[name], (*args[:-1], args[-1] or 0)


SHAPE_WAY_OUT = "use shapes that do not depend on values: masks instead of selection, padding instead of nonzero()"


def place(source_line: str, module: str) -> str:
    """``"model.py:12 in forward, in module layers.0"``."""
    return ", in module ".join(part for part in (source_line, module) if part)


def refuse(op: Any, where: str) -> None:
    """Ops that a program cannot hold.

    Raises:
        CaptureError: control flow and other higher-order ops, ops that write to their operands, random ops that have
            no stateless form.
    """
    if not isinstance(op, torch._ops.OpOverload):
        raise CaptureError(
            f"{getattr(op, '__name__', op)} is not supported in a captured graph",
            where=where,
            way_out="write it with plain tensor operations, or wrap it in torch.library.custom_op and declare its rule",
        )
    if op._schema.is_mutable:
        raise CaptureError(f"{op} writes to its operand and was not made functional", where=where)
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise CaptureError(
            f"the random op {op} has no stateless form",
            where=where,
            way_out="draw with torch.rand, randn, bernoulli, randint or dropout, or pass the draw as an input",
        )


def refuse_result(op: Any, result: Any, where: str) -> None:
    """Results whose shape depends on values.

    Raises:
        CaptureError: naming the op and the user's line.
    """
    symbolic = isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool)
    if isinstance(result, Tensor):
        symbolic = any(isinstance(size, torch.SymInt) for size in result.shape)
    if symbolic:
        raise CaptureError(f"{op} gives a data-dependent size or number", where=where, way_out=SHAPE_WAY_OUT)
