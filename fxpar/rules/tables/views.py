"""Ops that move dims and values without arithmetic on them, other than slicing and joining (see slices)."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from fxpar.plans.program import Arg
from fxpar.rules.factor_rule import Block, Call, Factors, Group, Slot
from fxpar.rules.groups import dims_of, loop, passes
from fxpar.rules.ops import strided  # noqa: F401  registers the ops
from fxpar.rules.registry import rule


def equal_products(left: tuple[int, ...], right: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Minimal groups of dims of equal product, left to right: (left dims, right dims, product).

    ``(6, 4)`` against ``(2, 3, 4)`` gives ``((0,), (0, 1), 6)`` and ``((1,), (2,), 4)``. Dims of size 1 join the group
    at their place. Empty when a size is 0.
    """
    if 0 in left or 0 in right:
        return []
    groups = []
    i = j = 0
    while i < len(left) or j < len(right):
        rows: tuple[list[int], list[int]] = ([], [])
        a = b = 1
        while not (rows[0] or rows[1]) or a != b:
            if (a <= b and i < len(left)) or j >= len(right):
                a *= left[i]
                rows[0].append(i)
                i += 1
            else:
                b *= right[j]
                rows[1].append(j)
                j += 1
        groups.append((tuple(rows[0]), tuple(rows[1]), a))
    return groups


def view(call: Call) -> Factors:
    """Flat groups of equal product: which atoms inside them survive is seen when they are laid over the atoms."""
    groups: tuple[Group, ...] = ()
    for left, right, size in equal_products(call.shape(0), call.out_shape()):
        groups += loop(call, size, {0: Slot(left)}, {0: Slot(right)})
    return Factors(groups, passes(call, "0"))


def local_reshape(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    """Local strides may differ from the global ones, so a view becomes a reshape to the local output shape."""
    operand = call.args[0]
    return "aten.reshape.default", (operand, block.output_shape())


rule(
    [
        "view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims",
        "flatten.using_ints", "unflatten.int", "view_copy", "unsqueeze_copy", "squeeze_copy",
    ],
    view,
    localise=local_reshape,
)  # fmt: skip


def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True when the strides are those of a contiguous tensor (dims of size 1 may have any)."""
    step = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and s != step:
            return False
        step *= n
    return True


def _covers(call: Call, base: tuple[int, ...]) -> bool:
    size = tuple(call.arg("size"))
    return prod(size) == prod(base) and not call.arg("storage_offset") and is_dense(size, tuple(call.arg("stride")))


def as_strided(call: Call) -> Factors:
    """All elements in order are a reshape; anything else is read whole."""
    return view(call) if _covers(call, call.shape(0)) else Factors((), passes(call, "0"))


def as_strided_scatter(call: Call) -> Factors:
    """When the strides cover all of ``self``, the result is ``src`` in the shape of ``self``."""
    if not _covers(call, call.shape(0)):
        return Factors()
    groups: tuple[Group, ...] = ()
    for left, right, size in equal_products(call.shape(1), call.out_shape()):
        groups += loop(call, size, {0: Slot(right), 1: Slot(left)}, {0: Slot(right)})
    return Factors(groups, passes(call, "1", "0>"))


def local_as_strided(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    return local_reshape(call, block) if _covers(call, call.shape(0)) else (call.op, call.args)


def local_as_strided_scatter(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    if not _covers(call, call.shape(0)):
        return call.op, call.args
    return "aten.reshape.default", (call.arg("src"), block.output_shape())


rule("fxpar::as_strided", as_strided, localise=local_as_strided)
rule("fxpar::as_strided_scatter", as_strided_scatter, localise=local_as_strided_scatter)


def permuted(order: Callable[[Call], tuple[int, ...]]) -> Callable[[Call], Factors]:
    """Output dim ``d`` is input dim ``order(call)[d]``."""

    def factors(call: Call) -> Factors:
        groups: tuple[Group, ...] = ()
        for out_dim, in_dim in enumerate(order(call)):
            groups += loop(call, call.shape(0)[in_dim], {0: in_dim}, {0: out_dim})
        return Factors(groups, passes(call, "0"))

    factors.__name__ = "permuted"
    return factors


def _swap(call: Call, a: int, b: int) -> tuple[int, ...]:
    order = list(range(len(call.shape(0))))
    if order:
        order[a], order[b] = order[b], order[a]
    return tuple(order)


rule("t", permuted(lambda call: tuple(reversed(range(len(call.shape(0)))))))
rule("numpy_T", permuted(lambda call: tuple(reversed(range(len(call.shape(0)))))))
rule(["transpose.int", "swapaxes"], permuted(lambda call: _swap(call, call.args[1], call.args[2])))  # type: ignore[arg-type]
rule(["adjoint", "mT"], permuted(lambda call: _swap(call, -1, -2)))
rule("permute", permuted(lambda call: tuple(d % len(call.shape(0)) for d in call.arg("dims"))))


def movedim_order(call: Call) -> tuple[int, ...]:
    rank = len(call.shape(0))
    source = [d % rank for d in call.arg("source")]
    target = [d % rank for d in call.arg("destination")]
    rest = iter([d for d in range(rank) if d not in source])
    return tuple(source[target.index(d)] if d in target else next(rest) for d in range(rank))


rule("movedim.intlist", permuted(movedim_order))


def expand(call: Call) -> Factors:
    """A dim of size 1 that grows is a loop of the output alone."""
    new = len(call.out_shape()) - len(call.shape(0))
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.out_shape()):
        carried = d >= new and call.shape(0)[d - new] == size
        groups += loop(call, size, {0: d - new} if carried else {}, {0: d})
    return Factors(groups, passes(call, "0"))


def local_expand(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    return "aten.expand.default", (call.args[0], block.output_shape(), False)


rule(["expand", "broadcast_to", "expand_copy"], expand, localise=local_expand)


def repeat(call: Call) -> Factors:
    """``n`` repeated ``r`` times is ``(r n)``; ``r`` is a loop of the output alone."""
    new = len(call.out_shape()) - len(call.shape(0))
    groups: tuple[Group, ...] = ()
    for d, times in enumerate(call.arg("repeats")):
        size = call.shape(0)[d - new] if d >= new else 1
        groups += loop(call, times, {}, {0: Slot((d,), 1, size)})
        groups += loop(call, size, {0: d - new}, {0: Slot((d,), times, 1)})
    return Factors(groups, passes(call, "0"))


def local_repeat(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    shape = block.input_shape(0)
    shape = (1,) * (len(block.output_shape()) - len(shape)) + shape
    times = tuple(out // size if size else 1 for out, size in zip(block.output_shape(), shape, strict=True))
    return call.op, call.with_args(repeats=times)


rule("repeat", repeat, localise=local_repeat)


def whole_dims(argument: str) -> Callable[[Call], Factors]:
    """Same shape in and out; the dims that ``argument`` names stay whole, the others are loops."""

    def factors(call: Call) -> Factors:
        # an empty list means no dim to flip, but the flattened tensor to roll
        named = call.arg(argument)
        kept = dims_of(named, len(call.shape(0))) if named != () or "roll" in call.op else ()
        groups: tuple[Group, ...] = ()
        for d, size in enumerate(call.shape(0)):
            groups += loop(call, size if d not in kept else 1, {0: d}, {0: d})
        return Factors(groups, passes(call, "0"))

    factors.__name__ = "whole_dims"
    return factors


rule(["flip", "roll"], whole_dims("dims"))


def diagonal(call: Call) -> Factors:
    """The two dims of the diagonal stay whole; the diagonal is the last dim of the output."""
    rank = len(call.shape(0))
    pair = (call.arg("dim1") % rank, call.arg("dim2") % rank)
    groups: tuple[Group, ...] = ()
    for out_dim, in_dim in enumerate(d for d in range(rank) if d not in pair):
        groups += loop(call, call.shape(0)[in_dim], {0: in_dim}, {0: out_dim})
    return Factors(groups, passes(call, "0"))


rule("diagonal", diagonal)


def diagonal_scatter(call: Call) -> Factors:
    """``self`` with its diagonal replaced by ``src``."""
    rank = len(call.shape(0))
    pair = (call.arg("dim1") % rank, call.arg("dim2") % rank)
    groups: tuple[Group, ...] = ()
    for src_dim, dim in enumerate(d for d in range(rank) if d not in pair):
        groups += loop(call, call.shape(0)[dim], {0: dim, 1: src_dim}, {0: dim})
    return Factors(groups, passes(call, "01"))


rule("diagonal_scatter", diagonal_scatter)


def diagonal_backward(call: Call) -> Factors:
    rank = len(call.out_shape())
    pair = (call.arg("dim1") % rank, call.arg("dim2") % rank)
    groups: tuple[Group, ...] = ()
    for grad_dim, dim in enumerate(d for d in range(rank) if d not in pair):
        groups += loop(call, call.out_shape()[dim], {0: grad_dim}, {0: dim})
    return Factors(groups, passes(call, "0"))


rule(
    "diagonal_backward",
    diagonal_backward,
    localise=lambda call, block: (call.op, call.with_args(input_sizes=block.output_shape())),
)

# a pair of reals in the last dim is one complex number
rule("view_as_complex", "... c! -> ...", linear=("0",))
rule("view_as_real", "... -> ... c!", linear=("0",))


def unfold(call: Call) -> Factors:
    """Windows of one dim: that dim stays whole, the window is the last dim of the output."""
    rank = len(call.shape(0))
    kept = call.arg("dimension") % max(rank, 1)
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.shape(0)):
        groups += loop(call, size if d != kept else 1, {0: d}, {0: d})
    return Factors(groups, passes(call, "0"))


rule("unfold", unfold)


def unfold_backward(call: Call) -> Factors:
    kept = call.arg("dim") % max(len(call.out_shape()), 1)
    groups: tuple[Group, ...] = ()
    for d, size in enumerate(call.out_shape()):
        groups += loop(call, size if d != kept else 1, {0: d}, {0: d})
    return Factors(groups, passes(call, "0"))


rule(
    "unfold_backward",
    unfold_backward,
    localise=lambda call, block: (call.op, call.with_args(input_sizes=block.output_shape())),
)
