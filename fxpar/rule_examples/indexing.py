"""Generators of calls that read or write at indices."""

from __future__ import annotations

from torch import Tensor

from fxpar.rule_examples.draw import Draw, calls
from fxpar.rules.soundness import Example, example


@calls("gather")
def gathered(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    x = draw.real(*draw.sizes(4, 3, 6))
    shape = list(x.shape)
    if draw.chance():
        shape[0 if dim == -1 else 2] //= 2
    shape[dim] = draw.size(1, 5)
    index = draw.below(x.shape[dim], *shape)
    return example("gather", x, dim, index)


@calls("scatter.src", "scatter.value", "scatter_add", "scatter.reduce", "scatter_reduce.two")
def scattered(draw: Draw, op: str) -> Example:
    dim = draw.pick(0, 1, -1)
    x = draw.real(*draw.sizes(4, 3, 6))
    shape = list(x.shape)
    if dim != 0 and draw.chance():
        shape[0] //= 2
    shape[dim] = draw.size(1, x.shape[dim])
    if op == "scatter_add":
        index = draw.below(x.shape[dim], *shape)
    else:
        index = draw.unique_rows(x.shape[dim], *shape, dim=dim % 3)
    source = draw.real(*(s + draw.pick(0, 0, 1) if d != dim % 3 else s for d, s in enumerate(shape)))
    if op == "scatter.value":
        return example(op, x, dim, index, draw.pick(0, 0.0, 1.5))
    if op == "scatter.reduce":
        return example(op, x, dim, index, source, reduce=draw.pick("add", "multiply"))
    if op == "scatter_reduce.two":
        return example(op, x, dim, index, source, draw.pick("sum", "amax", "mean"), include_self=draw.chance())
    return example(op, x, dim, index, source)


@calls("index.Tensor", "_unsafe_index.Tensor")
def indexed(draw: Draw, op: str) -> Example:
    x = draw.real(5, 4, 3)
    i, j = draw.below(5, *draw.pick((6,), (2, 3), (2, 1))), draw.below(4, *draw.pick((3,), (1,), (6, 3)))
    k = draw.below(3, 2, 3)
    options = (
        [i],
        [None, j],
        [draw.below(5, 2, 1), None, k],
        [None, draw.below(4, 3), k],
        [draw.below(5, 6), draw.below(4, 6)],
    )
    return example(op, x, draw.pick(*options))


@calls("index_put", "_unsafe_index_put", "_index_put_impl")
def put(draw: Draw, op: str) -> Example:
    indices: list[Tensor | None]
    x = draw.real(5, 4, 3)
    adds = draw.chance(0.7)
    kind = draw.pick("row", "columns", "apart", "pair")
    if kind == "row":
        rows = draw.below(5, 2, 3) if adds else draw.unique_rows(5, 4, dim=0)
        indices, shape = [rows], (*rows.shape, 4, 3)
    elif kind == "columns":
        columns = draw.below(4, 6) if adds else draw.unique_rows(4, 3, dim=0)
        indices, shape = [None, columns], (5, *columns.shape, 3)
    elif kind == "apart":
        rows = draw.below(5, 6) if adds else draw.unique_rows(5, 4, dim=0)
        indices, shape = [rows, None, draw.below(3, *rows.shape)], (*rows.shape, 4)
    else:
        rows = draw.below(5, 6, 1) if adds else draw.unique_rows(5, 4, 1, dim=0)
        columns = draw.below(4, 3) if adds else draw.unique_rows(4, 3, dim=0)
        indices, shape = [rows, columns], (rows.shape[0], 3, 3)
    return example(op, x, indices, draw.real(*(shape if draw.chance(0.7) else shape[1:])), adds)


@calls("index_select")
def index_selected(draw: Draw) -> Example:
    dim = draw.pick(0, 1, -1)
    shape = draw.sizes(4, 3, 6)
    return example("index_select", draw.real(*shape), dim, draw.below(shape[dim], draw.size(1, 6)))


@calls("index_add", "index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor")
def index_written(draw: Draw, op: str) -> Example:
    dim = draw.pick(0, 1, -1)
    shape = list(draw.sizes(4, 3, 6))
    index = draw.below(shape[dim], draw.size(1, 6)) if op == "index_add" else draw.unique_rows(shape[dim], 2, dim=0)
    if "fill" in op:
        return example(op, draw.real(*shape), dim, index, draw.pick(0, 1.5) if "Scalar" in op else draw.real())
    source = list(shape)
    source[dim] = len(index)
    return example(op, draw.real(*shape), dim, index, draw.real(*source))
