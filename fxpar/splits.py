"""Which logical dims a plan splits over which axes: read off its choices for the heavy ops of the forward."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fxpar.cost.op_work import TensorShape, tensor_bytes, work_of
from fxpar.names import Classes, batch_class, classes_of, names_of
from fxpar.plans.layout import largest_size
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, node_inputs
from fxpar.rules.choices import Factor, factors_on_atoms, sites_of
from fxpar.rules.factor_rule import argument_names

HEAVY = frozenset({
    "aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.convolution.default",
    "fxpar.attention.default", "fxpar.experts.default",
})
EXPLAINED = ("experts", "sequence")
"""Dims whose split is worth a reason: of the others every plan splits some."""
BATCH_DIM = "batch dim"
"""Provenance key of a plan: the dim of the inputs that is the batch, when the source says so."""


@dataclass(frozen=True)
class Named:
    """A program's classes of logical dims with their names."""

    classes: Classes
    names: tuple[str, ...]


@dataclass(frozen=True)
class SplitDim:
    """One dim that one axis splits: ``share`` of the flops of the forward's heavy ops where it does, ``size`` of the
    dim, ``pieces`` into which all axes together cut it there."""

    axis: str
    name: str
    share: float
    size: int
    pieces: int


def named_dims(program: Program, batch_dim: int | None) -> Named:
    """Names of a program's logical dims (see :mod:`fxpar.names`)."""
    classes = classes_of(program)
    return Named(classes, names_of(program, classes, batch_class(program, batch_dim, classes)))


def cut_factors(name: str) -> range:
    """Factors that a choice of one axis cuts: ``"f2+3"`` cuts 2, 3 and 4."""
    if not name.startswith("f"):
        return range(0)
    first, _, length = name[1:].partition("+")
    return range(int(first), int(first) + int(length or 1))


def split_dims(program: Program, decisions: Decisions, named: Named) -> tuple[SplitDim, ...]:
    """The dims that each axis splits in the forward's heavy ops, the largest share first."""
    total = 0
    found: dict[tuple[str, str], int] = defaultdict(int)
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    axes = decisions.mesh.axes
    sites = sites_of(program)
    for index, (node, choice) in enumerate(zip(program.nodes, decisions.choices, strict=True)):
        if node.op not in HEAVY or node.phase != "forward":
            continue
        flops = _flops(program, index)
        total += flops
        names = [named.names[number] for number in named.classes.of_factor[index]]
        factors = factors_on_atoms(sites[index])
        for axis, text in zip(axes, choice, strict=True):
            for name in sorted({names[f] for f in cut_factors(text)}):
                dim = _dim_of(factors, names, [f for f in cut_factors(text) if names[f] == name])
                size = math.prod(factors[f].size for f in dim)
                pieces = math.prod(
                    other.size for other, cut in zip(axes, choice, strict=True) if not dim.isdisjoint(cut_factors(cut))
                )
                found[axis.name, name] += flops
                sizes[axis.name, name] = max(sizes.get((axis.name, name), (0, 0)), (size, pieces))
    order = {axis.name: place for place, axis in enumerate(axes)}
    return tuple(
        SplitDim(axis, name, flops / max(total, 1), *sizes[axis, name])
        for (axis, name), flops in sorted(found.items(), key=lambda item: (order[item[0][0]], -item[1], item[0][1]))
    )


def _dim_of(factors: Sequence[Factor], names: Sequence[str], cut: Sequence[int]) -> frozenset[int]:
    """The cut factors with those of their name that lie in one dim of some tensor with them: all heads, be they split
    by group or within one. The rows and the keys of attention are both the sequence, and two dims."""

    def dims(f: int) -> set[tuple[int, int]]:
        positions = (*factors[f].inputs, *factors[f].outputs)
        return {(tensor, position[0]) for tensor, position in enumerate(positions) if position is not None}

    together = set().union(*map(dims, cut))
    return frozenset(f for f in range(len(factors)) if names[f] == names[cut[0]] and not together.isdisjoint(dims(f)))


def _flops(program: Program, index: int) -> int:
    node = program.nodes[index]

    def shape(value: int) -> TensorShape:
        return TensorShape(program.types[value].shape, program.types[value].dtype)

    outputs = [None if v < 0 else shape(v) for v in node.outputs]
    args = dict(zip(argument_names(node.op), node.args, strict=True))
    return work_of(node.op, [shape(v) for v in node_inputs(node)], outputs, args).flops


def weights_along(program: Program, decisions: Decisions, named: Named, name: str) -> tuple[int, int]:
    """(bytes, bytes that a device stores at most) of the parameters that have a dim of this name."""
    whole = stored = 0
    for item, layout in zip(program.inputs, decisions.inputs, strict=True):
        if item.kind == "parameter" and any(named.names[c] == name for c in named.classes.of_value(item.value)):
            kind = program.types[item.value]
            elements = largest_size(program.dims[item.value], layout, decisions.mesh)
            whole += tensor_bytes(TensorShape(kind.shape, kind.dtype))
            stored += tensor_bytes(TensorShape((elements,), kind.dtype))
    return whole, stored


def keeps_whole(name: str) -> str:
    """Name of the candidate that splits no dim called ``name``."""
    return f"{name} whole"
