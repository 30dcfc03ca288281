"""Ops that read or write at indices: an indexed dim stays whole, dims that run along with the indices are loops.

Writes that accumulate are sums over the indices: splitting those makes the output a pending sum to which the base is
added once.
"""

from __future__ import annotations

from fxpar.plans.program import Arg, Ref
from fxpar.rules.factor_rule import Block, Call, Factors, Group, Linear
from fxpar.rules.groups import loop, passes
from fxpar.rules.ops import gather_block  # noqa: F401  what gather from a split source becomes
from fxpar.rules.registry import rule
from fxpar.rules.tables.embeddings import flat_digits, is_whole


def gather(call: Call) -> Factors:
    """Along ``dim`` the index runs, and the source on its own: of a split source each rank gives the places it holds
    and zeros, a pending sum. Another dim is a loop when the index covers all of it."""
    source, index = call.operand("self"), call.operand("index")
    rank = len(call.out_shape())
    if source is None or index is None or rank == 0 or len(call.shape(source)) != rank:
        return Factors((), passes(call, "0"))
    dim = call.arg("dim") % rank
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.out_shape()):
        if d == dim:
            groups += loop(call, size, {index: d}, {0: d})
            if _sums(call):
                groups += loop(call, call.shape(source)[d], {source: d}, {}, contract={0: "sum"})
        elif call.shape(source)[d] == size:
            groups += loop(call, size, {source: d, index: d}, {0: d})
    return Factors(groups, passes(call, "0"))


def _sums(call: Call) -> bool:
    """True when zeros of ranks that do not hold a place add up to its value (not for bools)."""
    return call.inputs[0].dtype != "bool"


def local_gather(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    dim = call.arg("dim")
    if not block.inputs[0] or is_whole(block.inputs[0][dim]):
        return call.op, call.args
    return "fxpar.gather_block.default", (call.args[0], dim, call.arg("index"), flat_digits(block.inputs[0][dim]))


rule("gather", gather, localise=local_gather)


def scatter(call: Call) -> Factors:
    """``dim`` stays whole (adding: index and source are contracted); other dims that index and self share are loops."""
    index, source = call.operand("index"), call.operand("src") if call.has("src") else None
    rank = len(call.out_shape())
    if index is None or rank == 0:
        return Factors()
    dim = call.arg("dim") % rank
    adding = call.op.startswith("aten.scatter_add")
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.out_shape()):
        count = call.shape(index)[d]
        same_source = source is None or call.shape(source)[d] == count
        if d != dim and count == size and same_source:
            inputs = {0: d, index: d} | ({source: d} if source is not None else {})
            groups += loop(call, size, inputs, {0: d})
        elif d == dim and adding and source is not None and same_source:
            groups += loop(call, count, {index: d, source: d}, {}, contract={0: "sum"}, addends=(0,))
    if source is not None:
        return Factors(groups, passes(call, "02") if "reduce" not in call.op else ())
    return Factors(groups, passes(call, "0") if call.has("value") and call.arg("value") == 0 else ())


rule(["scatter.src", "scatter.value", "scatter_add"], scatter)


def scatter_reduced(call: Call) -> Factors:
    """Any other combination of what lands on one place: along ``dim`` all stays whole."""
    return Factors(tuple(g for g in scatter(call).groups if not any(g.contract)))


rule(["scatter_reduce.two", "scatter.reduce"], scatter_reduced)


def indexed(call: Call) -> tuple[list[int], list[int], tuple[int, ...], int, bool]:
    """(indexed dims of self, their index operands, broadcast index shape, its first dim in the result, usable)."""
    rank = len(call.shape(0))
    row = tuple(call.arg("indices"))
    dims = [d for d, item in enumerate(row) if isinstance(item, Ref)]
    operands = [item.id for item in row if isinstance(item, Ref)]
    usable = len(row) <= rank and all("int" in call.inputs[o].dtype for o in operands)
    shape: tuple[int, ...] = ()
    for o in operands:
        other = call.shape(o)
        width = max(len(shape), len(other))
        a, b = (1,) * (width - len(shape)) + shape, (1,) * (width - len(other)) + other
        shape = tuple(max(x, y) if 0 not in (x, y) else 0 for x, y in zip(a, b, strict=True))
    adjacent = not dims or dims == list(range(dims[0], dims[-1] + 1))
    return dims, operands, shape, dims[0] if dims and adjacent else 0, usable


def index_places(call: Call, operands: list[int], shape: tuple[int, ...], d: int) -> dict[int, int]:
    """Index operands that run along dim ``d`` of the broadcast index shape, and their dim."""
    found = {}
    for o in operands:
        place = d - len(shape) + len(call.shape(o))
        if place >= 0 and call.shape(o)[place] == shape[d]:
            found[o] = place
    return found


def result_dims(call: Call, dims: list[int], shape: tuple[int, ...], at: int) -> dict[int, int]:
    """Dim of self that is not indexed -> dim of ``self[indices]``."""
    rest = [d for d in range(len(call.shape(0))) if d not in dims]
    return {d: i if i < at else i + len(shape) for i, d in enumerate(rest)}


def index(call: Call) -> Factors:
    dims, operands, shape, at, usable = indexed(call)
    if not usable:
        return Factors()
    groups: tuple[Group, ...] = ()
    for d, out_dim in result_dims(call, dims, shape, at).items():
        groups += loop(call, call.shape(0)[d], {0: d}, {0: out_dim})
    for d, size in enumerate(shape):
        groups += loop(call, size, index_places(call, operands, shape, d), {0: at + d})
    return Factors(groups, (Linear((0,), (0,)),))


rule(["index.Tensor", "_unsafe_index.Tensor"], index)


def index_put(call: Call) -> Factors:
    """``self[indices] (+)= values``; values broadcast from the right to the shape of ``self[indices]``."""
    dims, operands, shape, at, usable = indexed(call)
    values = call.operand("values")
    if not usable or values is None:
        return Factors()
    places = result_dims(call, dims, shape, at)
    full = len(places) + len(shape)

    def of_values(result_dim: int, size: int) -> dict[int, int]:
        place = result_dim - full + len(call.shape(values))
        return {values: place} if place >= 0 and call.shape(values)[place] == size and size > 1 else {}

    groups: tuple[Group, ...] = ()
    for d, result_dim in places.items():
        size = call.shape(0)[d]
        groups += loop(call, size, {0: d, **of_values(result_dim, size)}, {0: d})
    if call.arg("accumulate"):
        for d, size in enumerate(shape):
            inputs = {**index_places(call, operands, shape, d), **of_values(at + d, size)}
            groups += loop(call, size, inputs, {}, contract={0: "sum"}, addends=(0,))
    return Factors(groups, (Linear((0, values), (0,)),))


rule(["index_put", "_unsafe_index_put", "_index_put_impl"], index_put)


def index_select(call: Call) -> Factors:
    rank = len(call.shape(0))
    if rank == 0:
        return Factors((), passes(call, "0"))
    dim = call.arg("dim") % rank
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.out_shape()):
        groups += loop(call, size, {0: d} if d != dim else {1: 0} if call.shape(1) else {}, {0: d})
    return Factors(groups, passes(call, "0"))


rule("index_select", index_select)


def index_write(call: Call) -> Factors:
    """``dim`` of self is written at ``index``; adding contracts index and source."""
    source = call.operand("source")
    rank = len(call.shape(0))
    if source is None or rank == 0 or len(call.shape(source)) != rank:
        return Factors()
    dim = call.arg("dim") % rank
    adding = call.op == "aten.index_add.default"
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)):
        if d != dim:
            groups += loop(call, size, {0: d, source: d}, {0: d})
        elif adding and call.shape(1):
            groups += loop(call, call.shape(1)[0], {1: 0, source: d}, {}, contract={0: "sum"}, addends=(0,))
    return Factors(groups, passes(call, "02"))


rule(["index_add", "index_copy"], index_write)


def index_fill(call: Call) -> Factors:
    rank = len(call.shape(0))
    dim = call.arg("dim") % max(rank, 1)
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)):
        groups += loop(call, size if d != dim else 1, {0: d}, {0: d})
    return Factors(groups, passes(call, "0") if call.has("value") and call.arg("value") == 0 else ())


rule(["index_fill.int_Scalar", "index_fill.int_Tensor"], index_fill)
