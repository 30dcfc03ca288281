"""Expansions of all ranks, step by step in one process: for judging rules, apart from the runtime's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Arg, Ref, map_refs
from fxpar.rules.choices import JointChoice, Site
from fxpar.rules.expansion import Exchange, Expansion, LocalOp, pieces
from fxpar.rules.localise import expansion_of
from fxpar.rules.run_op import run_op

_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def run_expansions(
    site: Site, choice: JointChoice, mesh: Mesh, operands: Sequence[Sequence[Tensor]]
) -> list[tuple[Tensor | None, ...]]:
    """Per rank the results of the call; ``operands[i][rank]`` are the pieces.

    Raises:
        ValueError: the ranks would not run the same steps, or a value has not the shape that was announced.
    """
    ranks = range(mesh.world_size)
    expansions = [expansion_of(site, choice, mesh, mesh.coordinates(rank)) for rank in ranks]
    if len({tuple(map(_shape_of, e.steps)) for e in expansions}) != 1:
        raise ValueError("the ranks do not run the same steps")
    values: list[dict[int, Tensor]] = [{i: row[rank] for i, row in enumerate(operands)} for rank in ranks]
    for index, step in enumerate(expansions[0].steps):
        steps = [e.steps[index] for e in expansions]
        if isinstance(step, LocalOp):
            for rank, one in enumerate(steps):
                if isinstance(one, LocalOp):
                    _run_local(one, values[rank])
        else:
            for group in mesh.groups((step.axis,)):
                same = [s for rank in group if isinstance(s := steps[rank], Exchange)]
                made = exchanged(same, [values[rank][step.value] for rank in group])
                for rank, tensor in zip(group, made, strict=True):
                    values[rank][step.output] = tensor
        for rank in ranks:
            _check(expansions[rank], index, values[rank])
    return [tuple(values[rank][v] if v >= 0 else None for v in expansions[rank].outputs) for rank in ranks]


def _shape_of(step: LocalOp | Exchange) -> tuple[object, ...]:
    if isinstance(step, LocalOp):
        return step.op, step.reads, step.outputs
    return step.kind, step.axis, step.reduce, step.value, step.output


def _run_local(step: LocalOp, values: dict[int, Tensor]) -> None:
    numbered: dict[int, Arg] = {v: Ref(i) for i, v in enumerate(step.reads)}
    row = run_op(step.op, tuple(map_refs(arg, numbered) for arg in step.args), [values[v] for v in step.reads])
    for value, tensor in zip(step.outputs, row, strict=True):
        if value >= 0 and tensor is not None:
            values[value] = tensor


def _check(expansion: Expansion, index: int, values: dict[int, Tensor]) -> None:
    step = expansion.steps[index]
    for value in step.outputs if isinstance(step, LocalOp) else (step.output,):
        if value >= 0 and tuple(values[value].shape) != expansion.types[value].shape:
            found, said = tuple(values[value].shape), expansion.types[value].shape
            raise ValueError(f"step {index} of the expansion makes {found}, not {said}")


def exchanged(steps: Sequence[Exchange], tensors: Sequence[Tensor]) -> list[Tensor]:
    """One collective of one group, in whole tensors."""
    step = steps[0]
    if step.kind == "all_reduce":
        total = reduce(_REDUCE[step.reduce], tensors)
        return [total.clone() for _ in tensors]
    if step.kind == "all_gather":
        return [torch.cat(list(tensors), step.dim) for _ in tensors]
    windows = list(zip(step.starts, step.ends, strict=True))
    low, high = min(step.starts + (0,)), max(*step.ends, sum(step.lengths))
    shape = list(tensors[0].shape)
    shape[step.dim] = high - low
    if step.kind == "halo":
        whole = tensors[0].new_full(shape, step.fill)
        whole.narrow(step.dim, -low, sum(step.lengths)).copy_(torch.cat(list(tensors), step.dim))
        return [whole.narrow(step.dim, start - low, end - start).clone() for start, end in windows]
    total = tensors[0].new_zeros(shape)
    for tensor, (start, end) in zip(tensors, windows, strict=True):
        total.narrow(step.dim, start - low, end - start).add_(tensor)
    return [total.narrow(step.dim, start - low, end - start).clone() for start, end in pieces(step.lengths)]
