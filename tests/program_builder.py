"""Programs written by hand for tests: each call infers its result types on torch's meta device."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

import fxpar.rules.ops  # noqa: F401
from fxpar.plans.program import Input, Node, Output, Program, Ref, TensorType
from fxpar.rules.factor_rule import torch_op
from fxpar.rules.registry import full_name


class ProgramBuilder:
    """``x = b.enter("x", (4, 6)); y = b.call("mm", x, w); program = b.done(loss=y)``."""

    def __init__(self) -> None:
        self.types: list[TensorType] = []
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.outputs: list[Output] = []
        self.phase = "forward"

    def _value(self, shape: tuple[int, ...], dtype: str) -> Ref:
        self.types.append(TensorType(tuple(shape), dtype))
        return Ref(len(self.types) - 1)

    def enter(self, name: str, shape: tuple[int, ...], kind: str = "input", dtype: str = "float32") -> Ref:
        ref = self._value(shape, dtype)
        self.inputs.append(Input(ref.id, kind, name))  # type: ignore[arg-type]
        return ref

    def parameter(self, name: str, shape: tuple[int, ...]) -> Ref:
        return self.enter(name, shape, "parameter")

    def call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """Add a node; its result Ref, or a tuple of them."""
        name = full_name(op)
        arguments = torch_op(name)._schema.arguments
        full = [
            args[i] if i < len(args) else kwargs[a.name] if a.name in kwargs else a.default_value
            for i, a in enumerate(arguments)
        ]
        full = [tuple(a) if isinstance(a, list) else a for a in full]
        meta = [self._meta(a) for a in full]
        positional = [m for m, a in zip(meta, arguments, strict=True) if not a.kwarg_only]
        result = torch_op(name)(
            *positional, **{a.name: m for m, a in zip(meta, arguments, strict=True) if a.kwarg_only}
        )
        many = isinstance(result, (tuple, list))
        refs = tuple(self._value(t.shape, str(t.dtype).removeprefix("torch.")) for t in (result if many else (result,)))
        self.nodes.append(Node(name, tuple(full), tuple(r.id for r in refs), self.phase))  # type: ignore[arg-type]
        return refs if many else refs[0]

    def _meta(self, arg: Any) -> Any:
        if isinstance(arg, Ref):
            type_ = self.types[arg.id]
            return torch.empty(type_.shape, dtype=getattr(torch, type_.dtype), device="meta")
        if isinstance(arg, tuple):
            return [self._meta(a) for a in arg]
        return arg

    def leave(self, ref: Ref, kind: str, name: str = "") -> None:
        self.outputs.append(Output(ref.id, kind, name))  # type: ignore[arg-type]

    def done(self) -> Program:
        return Program(tuple(self.types), tuple(self.inputs), tuple(self.nodes), tuple(self.outputs))


SIZES = [1, 2, 3, 4, 6, 8, 12]


@st.composite
def programs(draw: Any) -> Program:
    """Views, transposes, products, slices, joins and sums of random shapes."""
    b = ProgramBuilder()
    values = [b.enter(f"x{i}", tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))) for i in range(3)]
    for _ in range(draw(st.integers(1, 10))):
        x = draw(st.sampled_from(values))
        shape = b.types[x.id].shape
        kind = draw(st.sampled_from(["view", "transpose", "mm", "slice", "cat", "add", "split", "repeat"]))
        dim = draw(st.integers(0, len(shape) - 1))
        if kind == "view":
            total, new = math.prod(shape), []
            while total > 1 and len(new) < 3:
                new.append(draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0])))
                total //= new[-1]
            values.append(b.call("reshape", x, (*new, total)))
        elif kind == "transpose":
            values.append(b.call("transpose.int", x, dim, draw(st.integers(0, len(shape) - 1))))
        elif kind == "mm" and len(shape) == 2:
            values.append(b.call("mm", x, b.parameter(f"w{len(values)}", (shape[1], draw(st.sampled_from(SIZES))))))
        elif kind == "slice":
            low = draw(st.integers(0, shape[dim] - 1))
            values.append(b.call("slice.Tensor", x, dim, low, draw(st.integers(low + 1, shape[dim]))))
        elif kind == "cat":
            values.append(b.call("cat", (x, x), dim))
        elif kind == "add":
            values.append(b.call("add.Tensor", x, b.enter(f"y{len(values)}", shape)))
        elif kind == "split" and shape[dim] % 2 == 0:
            values += b.call("split.Tensor", x, shape[dim] // 2, dim)
        elif kind == "repeat" and math.prod(shape) < 200:
            values.append(b.call("repeat", x, tuple(2 if d == dim else 1 for d in range(len(shape)))))
    return b.done()
