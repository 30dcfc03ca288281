"""Microbatches as most training scripts mean them: each is a batch of its own, loss and gradients are averaged.

Goes in: the program captured of ONE microbatch, and the program of the whole batch, which says which inputs are cut.
Comes out: the first one, repeating. What it computes is the whole batch's step only where loss is a mean of samples
that count alike; batch statistics are those of a microbatch, and buffers (running means) are handed from one microbatch
to the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from fxpar.microbatches import SHARE, batch_cuts
from fxpar.model_source import ModelSource
from fxpar.names import batch_class, classes_of
from fxpar.plans.errors import UnsupportedError
from fxpar.plans.program import Arg, Join, Microbatches, Node, Output, Program, Ref, TensorType, map_refs, node_inputs
from fxpar.rules.factor_rule import argument_names
from fxpar.rules.ops.hub import HUB
from fxpar.rules.registry import rule_for
from fxpar.runtime.binding import leaf_paths


def first_microbatch(source: ModelSource, program: Program, count: int) -> ModelSource:
    """The source whose example inputs are the first of ``count`` microbatches.

    Args:
        program: of the whole batch.

    Raises:
        FxparError: the batch does not divide.
    """
    cuts = batch_cuts(program, count, source.batch_dim)

    def example_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = source.example_inputs()
        leaves, tree = pytree.tree_flatten((args, kwargs))
        names = [path for path, _ in leaf_paths(program.call, args, kwargs)]
        return pytree.tree_unflatten([part(leaf, cuts.get(n), count) for n, leaf in zip(names, leaves, strict=True)],
                                     tree)

    return dataclasses.replace(source, example_inputs=example_inputs)


def part(leaf: Any, dim: int | None, count: int) -> Any:
    """The first microbatch of one leaf of a call."""
    if dim is None or not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.narrow(dim, 0, leaf.shape[dim] // count).clone()


def repeat(program: Program, cuts: Mapping[str, int], count: int, batch_dim: int | None) -> Program:
    """``program`` of one microbatch, repeating ``count`` times.

    Args:
        cuts: input -> the dim along which its microbatches are cut.
        batch_dim: as in ``names.batch_class``.

    Raises:
        UnsupportedError: an output has no batch along which microbatches could be joined.
    """
    inputs = tuple(cuts.get(i.name, -1) if i.kind == "input" else -1 for i in program.inputs)
    joins = joins_of(program, batch_dim)
    moved = with_microbatch_seeds(averaged(program, count))
    return msgspec.structs.replace(moved, time=Microbatches(count, "accumulate", (), inputs, joins))


def joins_of(program: Program, batch_dim: int | None) -> tuple[Join, ...]:
    """How the outputs of microbatches join."""
    classes = classes_of(program)
    batch = batch_class(program, batch_dim, classes)

    def join(output: Output) -> Join:
        if output.kind != "output":
            return "chain" if output.kind == "buffer" else "sum"
        for dim, row in enumerate(classes.of_atom[output.value]):
            if row and row[0] in batch:
                return dim
        raise UnsupportedError(f"the output {output.name} holds no batch along which microbatches could be joined",
                               where="--microbatches", way_out="--outputs loss")

    return tuple(map(join, program.outputs))


def averaged(program: Program, count: int) -> Program:
    """Loss and gradients of a microbatch as their shares of the means: what microbatches leave is summed."""
    types, dims = list(program.types), list(program.dims)

    def share(value: int, phase: str) -> Node:
        types.append(types[value])
        dims.append(dims[value])
        return Node(SHARE, (Ref(value), count), (len(types) - 1,), phase)  # type: ignore[arg-type]

    late = next((n for n, node in enumerate(program.nodes) if node.phase == "backward"), len(program.nodes))
    loss = next(o.value for o in program.outputs if o.kind == "loss")
    nodes = [*program.nodes[:late], shared := share(loss, "forward")]
    replaced: dict[int, Arg] = {}
    for item in program.inputs:
        if item.kind == "tangent":
            nodes.append(share(item.value, "backward"))
            replaced[item.value] = Ref(nodes[-1].outputs[0])
    nodes += [
        msgspec.structs.replace(node, args=tuple(map_refs(arg, replaced) for arg in node.args))
        for node in program.nodes[late:]
    ]

    def leaving(output: Output) -> Output:
        if output.kind == "loss":
            return msgspec.structs.replace(output, value=shared.outputs[0])
        new = replaced.get(output.value) if output.kind == "gradient" else None
        return msgspec.structs.replace(output, value=new.id) if isinstance(new, Ref) else output

    return msgspec.structs.replace(
        program, types=tuple(types), dims=tuple(dims), nodes=tuple(nodes), outputs=tuple(map(leaving, program.outputs))
    )


def with_microbatch_seeds(program: Program) -> Program:
    """Random ops draw for every microbatch anew: as for the next elements of one long batch."""
    seeds = {i.value for i in program.inputs if i.kind == "seed"}
    nodes = []
    for node in program.nodes:
        if node.op == HUB and not seeds.isdisjoint(node_inputs(node)):
            seeds.update(node.outputs)
        declared = rule_for(node.op)
        if declared is not None and declared.random and not seeds.isdisjoint(node_inputs(node)):
            place = argument_names(node.op).index("geometry")
            geometry = node.args[place]
            assert isinstance(geometry, tuple)
            moving = (*geometry, math.prod(int(n) for n in geometry[::3]))  # type: ignore[arg-type, misc]
            node = msgspec.structs.replace(node, args=(*node.args[:place], moving, *node.args[place + 1 :]))
        nodes.append(node)
    types = tuple(TensorType((2,), k.dtype) if v in seeds else k for v, k in enumerate(program.types))
    dims = tuple(((2,),) if v in seeds else d for v, d in enumerate(program.dims))
    return msgspec.structs.replace(program, types=types, dims=dims, nodes=tuple(nodes))
