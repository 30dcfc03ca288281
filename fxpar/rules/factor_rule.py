"""What a rule says of one op call: its factors (loops), what is contracted, what is linear, how args become local.

Words. A *factor group* is a loop of the op that runs over some region of each operand: a :class:`Slot` names the
region (a row of tensor dims, major first, without ``lead`` outer and ``trail`` inner elements that stay whole). The
groups of a call, laid over the logical dims of its operands, give the factors that a mesh axis may split
(:mod:`fxpar.rules.choices`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch

from fxpar.plans.layout import Digit
from fxpar.plans.program import Arg, Node, Program, Ref, TensorType, map_refs, node_inputs


def torch_op(op: str) -> torch._ops.OpOverload:
    """The torch op of a program name ``"namespace.name.overload"``.

    Raises:
        AttributeError: torch has no such op registered.
    """
    # a user's op is another object once its module ran again, and the old one must not be called
    return _lasting_op(op) if op.startswith(("aten.", "fxpar.")) else _registered_op(op)


def _registered_op(op: str) -> torch._ops.OpOverload:
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


_lasting_op = cache(_registered_op)


@cache
def argument_names(op: str) -> tuple[str, ...]:
    """Names of the op's schema arguments, in the order of ``Node.args``."""
    return tuple(a.name for a in torch_op(op)._schema.arguments)


@dataclass(frozen=True)
class Call:
    """One op call seen by a rule: tensor operands are numbered 0.. in argument order (``Ref.id`` IS that number)."""

    op: str
    args: tuple[Arg, ...]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType | None, ...]

    def arg(self, name: str) -> Any:
        """Value of a schema argument."""
        return self.args[argument_names(self.op).index(name)]

    def has(self, name: str) -> bool:
        """True when the op's schema has the argument."""
        return name in argument_names(self.op)

    def operand(self, name: str) -> int | None:
        """Operand number of a tensor argument, None when the call passes none."""
        arg = self.arg(name)
        return arg.id if isinstance(arg, Ref) else None

    def shape(self, operand: int) -> tuple[int, ...]:
        return self.inputs[operand].shape

    def out_shape(self, output: int = 0) -> tuple[int, ...]:
        result = self.outputs[output]
        return () if result is None else result.shape

    def with_args(self, /, **changes: Arg) -> tuple[Arg, ...]:
        """``args`` with some schema arguments replaced."""
        names = argument_names(self.op)
        unknown = set(changes) - set(names)
        if unknown:
            raise KeyError(f"{self.op} has no argument {sorted(unknown)}")
        return tuple(changes.get(name, arg) for name, arg in zip(names, self.args, strict=True))


def call_of(node: Node, program: Program) -> Call:
    """The node as a rule sees it."""
    operands = iter(range(len(node_inputs(node))))
    args = tuple(_number(arg, operands) for arg in node.args)
    return Call(
        node.op,
        args,
        tuple(program.types[v] for v in node_inputs(node)),
        tuple(None if v < 0 else program.types[v] for v in node.outputs),
    )


def _number(arg: Arg, operands: Any) -> Arg:
    if isinstance(arg, Ref):
        return Ref(next(operands))
    if isinstance(arg, tuple):
        return tuple(_number(item, operands) for item in arg)
    return arg


def rebind(args: tuple[Arg, ...], values: Sequence[int]) -> tuple[Arg, ...]:
    """Inverse of the numbering: operand numbers become value ids."""
    table: dict[int, Arg] = {i: Ref(v) for i, v in enumerate(values)}
    return tuple(map_refs(arg, table) for arg in args)


@dataclass(frozen=True)
class Slot:
    """A region of one operand: dims ``dims`` flattened, ``lead`` outer and ``trail`` inner elements left whole.

    The product of the dims is ``lead * size * trail`` with ``size`` the group's size.
    """

    dims: tuple[int, ...]
    lead: int = 1
    trail: int = 1


@dataclass(frozen=True)
class Group:
    """A loop that may be split.

    ``inputs`` / ``outputs``: the operand's region, None where it does not carry the loop. ``contract``: per output
    without a region, the pending reduction when the loop is split (None: the output does not depend on it).
    ``addends``: operands that are added once (a bias): pending when a contracted loop is split.
    ``nonempty``: no rank may get an empty piece (a maximum over nothing is undefined).
    ``soft``: evidence for cutting a dim that yields to the evidence of views.
    ``expands``: what splitting the loop needs beside a local call; the rule's ``expand`` is told by this word.
    ``loose``: the loop is a whole dim in every operand that carries it, each cut by its own length (the rows of an
    image and of what a convolution makes of it need not be equally many); its slots name one dim each.
    """

    size: int
    inputs: tuple[Slot | None, ...]
    outputs: tuple[Slot | None, ...]
    contract: tuple[str | None, ...]
    addends: tuple[int, ...] = ()
    nonempty: bool = False
    soft: bool = False
    expands: str = ""
    loose: bool = False


@dataclass(frozen=True)
class Linear:
    """Pending sums of ``inputs`` (jointly) pass to ``outputs``; the other outputs do not read those inputs."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Factors:
    """All a rule says of one call."""

    groups: tuple[Group, ...] = ()
    linear: tuple[Linear, ...] = ()


@dataclass(frozen=True)
class Block:
    """The local pieces of one rank: digits per operand and output, per tensor dim (see ``plans.layout.digits``)."""

    inputs: tuple[tuple[tuple[Digit, ...], ...], ...]
    outputs: tuple[tuple[tuple[Digit, ...], ...] | None, ...]

    def input_shape(self, operand: int) -> tuple[int, ...]:
        return tuple(prod(d.length for d in row) for row in self.inputs[operand])

    def output_shape(self, output: int = 0) -> tuple[int, ...]:
        rows = self.outputs[output]
        return () if rows is None else tuple(prod(d.length for d in row) for row in rows)


Localise = Callable[[Call, Block], "tuple[str, tuple[Arg, ...]]"]
"""(call, block) -> (op, args) to run locally; args name operands by number."""


Offers = Callable[[Call, "tuple[str, ...]", "tuple[int, ...]"], bool]
"""(call, word per mesh axis (see ``Group.expands``), sizes of the axes) -> may these axes split so together?"""


@dataclass(frozen=True)
class Rule:
    """A declared rule: ``factors(call)`` and how the call becomes local (None: the same call on the local tensors).

    ``expand``: what runs instead where an axis splits a loop that ``expands`` (:mod:`fxpar.rules.expansion`);
    ``offers``: which such choices there are (None: all).
    ``declared``: digest of the user's words, empty for fxpar's own rules.
    """

    op: str
    factors: Callable[[Call], Factors]
    localise: Localise | None = None
    text: str = ""
    random: bool = field(default=False)
    declared: str = ""
    expand: Callable[[Any], tuple[Ref | None, ...]] | None = None
    offers: Offers | None = None
