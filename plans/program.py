"""A program: one captured joint (forward + backward) graph as plain data, global shapes, no torch.

Values are numbered in definition order (SSA). Every node's ``args`` are aligned with the arguments of its op's
schema, defaults filled in; tensors are :class:`Ref`, dtypes :class:`Dtype`; devices are dropped (None): the program
is device-neutral. A node with several results lists several outputs (no getitem); an unused or absent result is -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias, Union

import msgspec

from fxpar.plans.layout import Dims


class Ref(msgspec.Struct, frozen=True, tag="v", tag_field="t"):
    """Use of the value ``id``."""

    id: int


class Dtype(msgspec.Struct, frozen=True, tag="d", tag_field="t"):
    """A torch dtype by name (``"float32"``)."""

    name: str


Leaf: TypeAlias = Union[None, bool, int, float, str, Ref, Dtype]


def _nested(depth: int) -> object:
    """Leaves and tuples of them down to ``depth``: msgspec checks no type that names itself."""
    return Leaf if depth == 0 else Union[Leaf, tuple[_nested(depth - 1), ...]]  # type: ignore[misc]


if TYPE_CHECKING:
    Arg: TypeAlias = Union[Leaf, tuple["Arg", ...]]
else:
    Arg = _nested(16)


class TensorType(msgspec.Struct, frozen=True, array_like=True):
    """Global shape and dtype name."""

    shape: tuple[int, ...]
    dtype: str


class Node(msgspec.Struct, frozen=True, array_like=True):
    """One op call.

    ``op`` is ``"namespace.name.overload"`` (``"aten.mm.default"``); ``module`` the dotted module path, ``source``
    the user's ``file:line in function``; ``phase`` says on which side of the loss the node runs.
    """

    op: str
    args: tuple[Arg, ...]
    outputs: tuple[int, ...]
    phase: Literal["forward", "backward"]
    module: str = ""
    source: str = ""


class Input(msgspec.Struct, frozen=True, array_like=True):
    """A value that enters the program.

    ``parameter`` and ``buffer``: ``name`` is the qualified name, ``ties`` its further names. ``constant``: ``name``
    indexes ``Program.constants``. ``input``: ``name`` is the path of the tensor in the bound call (``"input_ids"``,
    ``"batch['x'][0]"``). ``tangent``: d(total)/d(loss), a scalar. ``seed``: int64 scalar, new each step.
    ``microbatch``: int64 scalar, which of the step's microbatches it is.
    """

    value: int
    kind: Literal["parameter", "buffer", "constant", "input", "tangent", "seed", "microbatch"]
    name: str
    ties: tuple[str, ...] = ()
    requires_grad: bool = False
    persistent: bool = True


class Output(msgspec.Struct, frozen=True, array_like=True):
    """A value that leaves: the ``loss``, a further ``output`` (``name`` its path), a new ``buffer`` value or the
    ``gradient`` of the parameter ``name``."""

    value: int
    kind: Literal["loss", "output", "buffer", "gradient"]
    name: str


class Constant(msgspec.Struct, frozen=True, array_like=True):
    """A small tensor baked into the program: raw little-endian bytes."""

    type: TensorType
    data: bytes


Join: TypeAlias = int | Literal["sum", "mean", "same", "chain"]
"""How the results of all microbatches become the step's: concatenated along a dim (its number), added up, averaged,
equal in all of them, or the last one, each microbatch having begun with what the one before it left (a buffer)."""


class Microbatches(msgspec.Struct, frozen=True):
    """A program that is run ``count`` times in a step, each time on a part of the batch.

    Types and dims of the program are those of ONE microbatch. ``semantics``: "exact": loss and gradients are those of
    the whole batch; "accumulate": each microbatch is a batch of its own, and loss and gradients are their means.
    ``once``: nodes that run once a step, before the first microbatch, on whole inputs. ``inputs``: per program input
    the dim along which its microbatches are cut, -1 for one that every microbatch reads whole. ``outputs``: per
    program output how its microbatches join. A ``seed`` input is int64 ``[seed, number of the microbatch]``.
    """

    count: int
    semantics: Literal["exact", "accumulate"]
    once: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Join, ...]


class Program(msgspec.Struct, frozen=True):
    """The whole joint graph.

    ``types[v]`` and ``dims[v]`` describe value ``v`` (``dims`` is empty until logical dims are analysed).
    ``baked`` are the non-tensor leaves of the example call that the graph depends on, as (path, repr).
    ``call`` lists the parameter names of the user's forward in order (for positional calls);
    ``structure`` is the output structure: nested ("dict", keys, children...) / ("list"|"tuple", children...) /
    ("object", class name, keys, children...) / ("value", output index) / ("const", literal).
    ``time``: how the program repeats within a step, None for one that runs once on the whole batch.
    """

    types: tuple[TensorType, ...]
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    dims: tuple[Dims, ...] = ()
    constants: tuple[Constant, ...] = ()
    baked: tuple[tuple[str, str], ...] = ()
    call: tuple[str, ...] = ()
    structure: Arg = None
    time: Microbatches | None = None

    @property
    def microbatches(self) -> int:
        """How often a step runs the program."""
        return 1 if self.time is None else self.time.count


def refs(arg: Arg) -> Iterator[int]:
    """Value ids used by one argument, left to right (also nested)."""
    if isinstance(arg, Ref):
        yield arg.id
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def node_inputs(node: Node) -> tuple[int, ...]:
    """Value ids of all tensor operands in argument order, nested lists flattened: an op's *tensor inputs*."""
    found: list[int] = []
    for arg in node.args:  # most are no tuples: asked for every node many times, this is half the time of a generator
        if type(arg) is Ref:
            found.append(arg.id)
        elif type(arg) is tuple:
            found += refs(arg)
    return tuple(found)


def map_refs(arg: Arg, replace: dict[int, Arg]) -> Arg:
    """``arg`` with every Ref replaced through ``replace`` (ids that are absent stay)."""
    if isinstance(arg, Ref):
        return replace.get(arg.id, arg)
    if isinstance(arg, tuple):
        return tuple(map_refs(item, replace) for item in arg)
    return arg


def consumers(program: Program) -> list[list[int]]:
    """Per value, indices of the nodes that read it (each once, in order)."""
    users: list[list[int]] = [[] for _ in program.types]
    for index, node in enumerate(program.nodes):
        for value in dict.fromkeys(node_inputs(node)):
            users[value].append(index)
    return users


def whole_type(program: Program, position: int) -> TensorType:
    """Type of the program input at ``position`` for the whole batch: of one that is cut in time, all microbatches."""
    kind = program.types[program.inputs[position].value]
    cuts = program.time.inputs if program.time is not None else ()
    if not (position < len(cuts) and 0 <= cuts[position] < len(kind.shape)):
        return kind
    dim = cuts[position]
    size = kind.shape[dim] * program.microbatches
    return TensorType((*kind.shape[:dim], size, *kind.shape[dim + 1 :]), kind.dtype)
