"""What one rank runs where a local call is not enough: a few local ops and collectives in place of one call.

    softmax(x) over a cut dim   ->   top = all_reduce(max of x); total = all_reduce(sum of exp(x - top));
                                     exp(x - top) / total

A rule names a function of an :class:`Emission` (``rule(..., expand=function)``) and marks the loops it is for
(``loop(..., expands="word")``). Where an axis splits such a loop, the function is called once for every rank; it must
emit the same ops and collectives on all of them, arguments and shapes aside. A choice's name determines the result, so
a plan holds nothing of it. Prices, simulation, memory, virtual and real ranks all read the steps emitted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from fxpar.plans.program import Arg, Ref, TensorType, map_refs, refs
from fxpar.rules.factor_rule import Block, Call, torch_op
from fxpar.rules.run_op import result_types

ExchangeKind: TypeAlias = Literal["all_reduce", "all_gather", "halo", "halo_sum"]


@dataclass(frozen=True)
class LocalOp:
    """An op on values of the expansion; ``outputs`` are -1 where a result is missing or not wanted."""

    op: str
    args: tuple[Arg, ...]
    reads: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """A collective on mesh axis ``axis``.

    ``all_reduce``: by ``reduce``. ``all_gather``: joins pieces of ``lengths`` along ``dim``. ``halo``: rank i holds
    ``lengths[i]`` consecutive elements of ``dim`` and gets the window ``[starts[i], ends[i])`` of the whole, ``fill``
    where it reaches beyond the ends. ``halo_sum``, its transpose: rank i holds such a window and gets the sum of all
    windows on its own elements. ``elements``: of the full tensor of an all-reduce or all-gather, the most that one
    rank sends to another of a halo.
    """

    kind: ExchangeKind
    axis: int
    value: int
    output: int
    elements: int
    reduce: Literal["sum", "max", "min"] = "sum"
    dim: int = 0
    lengths: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    fill: float = 0.0


@dataclass(frozen=True)
class Expansion:
    """Steps of one rank. Values are numbered: the call's operands, then what the steps make; ``types`` of all.

    ``outputs``: per output of the call its value, -1 where it is missing.
    """

    types: tuple[TensorType, ...]
    steps: tuple[LocalOp | Exchange, ...]
    outputs: tuple[int, ...]


class Emission:
    """Collects the steps of one rank; values are ``Ref``.

    Attributes:
        call, block: the whole call and the digits of this rank's pieces.
        words: per mesh axis the word of the loop it splits (empty: a plain loop, or none).
        sizes, coords: of the mesh, and this rank's place on it.
    """

    def __init__(
        self, call: Call, block: Block, words: tuple[str, ...], sizes: tuple[int, ...], coords: tuple[int, ...]
    ) -> None:
        self.call, self.block, self.words, self.sizes, self.coords = call, block, words, sizes, coords
        self.types = [
            TensorType(block.input_shape(i), operand.dtype) for i, operand in enumerate(call.inputs)
        ]
        self.steps: list[LocalOp | Exchange] = []

    def operand(self, name: str) -> Ref:
        """The local piece of a tensor argument that the call passes."""
        arg = self.call.arg(name)
        if not isinstance(arg, Ref):
            raise ValueError(f"{self.call.op} is called without {name}")
        return arg

    def shape(self, value: Ref) -> tuple[int, ...]:
        return self.types[value.id].shape

    def dtype(self, value: Ref) -> str:
        return self.types[value.id].dtype

    def op(self, op: str, *args: Arg, wanted: Sequence[bool] | None = None) -> tuple[Ref, ...]:
        """Emit an op; arguments that are left out get the schema's defaults. ``wanted``: which results are kept."""
        schema = torch_op(op)._schema.arguments
        row = (*args, *(_plain(declared.default_value) for declared in schema[len(args) :]))
        reads = tuple(dict.fromkeys(v for arg in row for v in refs(arg)))
        numbered: dict[int, Arg] = {v: Ref(i) for i, v in enumerate(reads)}
        made = result_types(op, tuple(map_refs(arg, numbered) for arg in row), tuple(self.types[v] for v in reads))
        outputs = [
            self._new(kind) if kind is not None and (wanted is None or wanted[i]) else -1
            for i, kind in enumerate(made)
        ]
        self.steps.append(LocalOp(op, row, reads, tuple(outputs)))
        return tuple(Ref(v) for v in outputs)

    def call_with(self, /, **changes: Arg) -> tuple[Ref, ...]:
        """Emit the call itself with some arguments replaced."""
        return self.op(self.call.op, *self.call.with_args(**changes), wanted=[o is not None for o in self.call.outputs])

    def axes(self, word: str) -> tuple[int, ...]:
        """Mesh axes that split the loop of this word."""
        return tuple(axis for axis, found in enumerate(self.words) if found == word)

    def all_reduce(self, value: Ref, reduce: Literal["sum", "max", "min"], word: str) -> Ref:
        """Emit the reduction over every axis that splits the loop of this word."""
        for axis in self.axes(word):
            value = self._exchange("all_reduce", axis, value, self.shape(value), prod(self.shape(value)), reduce=reduce)
        return value

    def all_gather(self, value: Ref, dim: int, axis: int) -> Ref:
        """Emit the joining of equal pieces along ``dim``."""
        shape, n = self.shape(value), self.sizes[axis]
        joined = (*shape[:dim], shape[dim] * n, *shape[dim + 1 :])
        lengths = (shape[dim],) * n
        return self._exchange("all_gather", axis, value, joined, prod(joined), dim=dim, lengths=lengths)

    def halo(
        self, value: Ref, dim: int, axis: int, lengths: Sequence[int], windows: Sequence[tuple[int, int]],
        fill: float = 0.0,
    ) -> Ref:
        """Emit the exchange after which every rank has its window (see :class:`Exchange`); nothing when it has."""
        start, end = windows[self.coords[axis]]
        return self._halo("halo", value, dim, axis, end - start, lengths, windows, fill)

    def halo_sum(
        self, value: Ref, dim: int, axis: int, lengths: Sequence[int], windows: Sequence[tuple[int, int]]
    ) -> Ref:
        """Emit the transpose of :meth:`halo`."""
        return self._halo("halo_sum", value, dim, axis, lengths[self.coords[axis]], lengths, windows, 0.0)

    def _halo(
        self, kind: ExchangeKind, value: Ref, dim: int, axis: int, length: int, lengths: Sequence[int],
        windows: Sequence[tuple[int, int]], fill: float,
    ) -> Ref:
        shape = self.shape(value)
        if list(windows) == pieces(lengths):
            return value
        rows = most_sent(tuple(lengths), tuple(windows))
        elements = rows * prod(shape[:dim]) * prod(shape[dim + 1 :])
        return self._exchange(
            kind, axis, value, (*shape[:dim], length, *shape[dim + 1 :]), elements, dim=dim, lengths=tuple(lengths),
            starts=tuple(s for s, _ in windows), ends=tuple(e for _, e in windows), fill=fill,
        )  # fmt: skip

    def _exchange(
        self, kind: ExchangeKind, axis: int, value: Ref, shape: tuple[int, ...], elements: int, **rest: object
    ) -> Ref:
        output = self._new(TensorType(shape, self.dtype(value)))
        self.steps.append(Exchange(kind, axis, value.id, output, elements, **rest))  # type: ignore[arg-type]
        return Ref(output)

    def _new(self, kind: TensorType) -> int:
        self.types.append(kind)
        return len(self.types) - 1

    def finished(self, outputs: Sequence[Ref | None]) -> Expansion:
        """All steps, with the values of the call's outputs."""
        return Expansion(tuple(self.types), tuple(self.steps), tuple(-1 if v is None else v.id for v in outputs))


def _plain(value: object) -> Arg:
    return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]


Expand: TypeAlias = "Callable[[Emission], tuple[Ref | None, ...]]"
"""Emits the steps of one rank; returns the value of every output of the call, None where it is missing."""


def pieces(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive [start, end) of the lengths."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The common part of two intervals, empty where they part."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def most_sent(lengths: tuple[int, ...], windows: tuple[tuple[int, int], ...]) -> int:
    """The most elements of the cut dim that one rank holds of another's window."""
    held = pieces(lengths)
    found = [overlap(held[i], windows[j]) for i in range(len(held)) for j in range(len(held)) if i != j]
    return max((end - start for start, end in found), default=0)


def only_neighbours(lengths: Sequence[int], windows: Sequence[tuple[int, int]]) -> bool:
    """True when no rank needs anything of ranks that are not next to it."""
    held = pieces(lengths)
    return not any(
        end > start
        for i in range(len(held)) for j in range(len(held)) if abs(i - j) > 1
        for start, end in (overlap(held[i], windows[j]),)
    )

