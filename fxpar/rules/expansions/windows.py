"""Convolutions and pooling over a cut image: every rank gets the rows that its own results read, from its neighbours.

    y rows [a, b) read x rows [a * stride - pad, (b - 1) * stride - pad + reach),  reach = dilation * (kernel - 1) + 1

    forward    x' = halo(x), padded at the ends of the image;   y = op(x') without padding in that dim
    backward   dx', dw = op's backward(dy, x');   dx = halo_sum(dx')

Loops of a spatial dim carry the word ``space<d>``, one axis each. Input and output are cut by their own lengths; the
choice is offered where no rank reads beyond its neighbours' pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from fxpar.plans.layout import chunk
from fxpar.plans.program import Arg, Ref
from fxpar.rules.expansion import Emission, only_neighbours
from fxpar.rules.factor_rule import Call, Group
from fxpar.rules.groups import loop
from fxpar.rules.ops import pool_parts  # noqa: F401  registers the ops

SPACE = "space"


@dataclass(frozen=True)
class Sliding:
    """One spatial dim: its length before and after, and the window that slides over it."""

    size: int
    made: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def windows(self, ranks: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """(lengths of the input's pieces, the rows of the input that every piece of the output reads)."""
        lengths = tuple(chunk(0, self.size, ranks, i)[1] for i in range(ranks))
        reach = self.dilation * (self.kernel - 1) + 1
        found = []
        for i in range(ranks):
            first, count = chunk(0, self.made, ranks, i)
            start = first * self.stride - self.padding
            found.append((start, start + (count - 1) * self.stride + reach))
        return lengths, tuple(found)

    def fits(self, ranks: int) -> bool:
        """True when every rank has something to hold and to make, and reads no further than its neighbours."""
        if min(chunk(0, n, ranks, ranks - 1)[1] for n in (self.size, self.made)) < 1:
            return False
        return only_neighbours(*self.windows(ranks))

    @property
    def patches(self) -> bool:
        """True when windows neither overlap nor leave anything out: pieces are local."""
        whole = self.size % self.kernel == 0
        return self.padding == 0 and self.dilation == 1 and self.stride == self.kernel and whole


def sliding(call: Call) -> tuple[Sliding, ...]:
    """The spatial dims of a convolution or pooling, forward or backward."""
    backward = "backward" in call.op
    if backward:
        made, image = call.shape(0), call.shape(1)
    else:
        image, made = call.shape(0), call.out_shape()
    if call.has("weight"):
        weight = call.operand("weight")
        assert weight is not None
        kernel: Sequence[int] = call.shape(weight)[2:]
    else:
        kernel = call.arg("kernel_size")
    dims = len(kernel) if call.has("weight") else int(call.op[call.op.index("_pool") + 5])
    # a pooling without a stride moves by its kernel
    given = call.arg("stride") or kernel
    rows = [_each(kernel, dims), _each(given, dims), _each(call.arg("padding"), dims)]
    rows.append(_each(call.arg("dilation"), dims) if call.has("dilation") else (1,) * dims)
    lead = len(image) - dims
    return tuple(Sliding(image[lead + d], made[lead + d], *(row[d] for row in rows)) for d in range(dims))


def _each(value: Sequence[int], dims: int) -> tuple[int, ...]:
    """One number stands for all dims."""
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def space_loops(
    call: Call, inputs: Sequence[int], outputs: Sequence[int], contract: dict[int, str], skip_patches: bool
) -> tuple[Group, ...]:
    """The spatial loops of the operands and outputs that have them, over both ends of the window."""
    found: tuple[Group, ...] = ()
    for d, one in enumerate(sliding(call)):
        if skip_patches and one.patches:
            continue
        lead = len(call.shape(inputs[0])) - len(sliding(call))
        at_in, at_out = dict.fromkeys(inputs, lead + d), dict.fromkeys(outputs, lead + d)
        found += loop(
            call, min(one.size, one.made), at_in, at_out, contract=contract, nonempty=True, expands=f"{SPACE}{d}",
            loose=True,
        )  # fmt: skip
    return found


def neighbours_suffice(call: Call, words: tuple[str, ...], sizes: tuple[int, ...]) -> bool:
    """True when each spatial dim is split by one axis at most, and no rank reads beyond its neighbours."""
    used = [(word, ranks) for word, ranks in zip(words, sizes, strict=True) if word]
    if len({word for word, _ in used}) != len(used):
        return False
    rows = sliding(call)
    return all(rows[int(word.removeprefix(SPACE))].fits(ranks) for word, ranks in used)


@dataclass(frozen=True)
class _Cut:
    """A spatial dim that an axis splits: its number, place in the tensor, axis, pieces and windows."""

    number: int
    dim: int
    axis: int
    lengths: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]


def _cuts(e: Emission, rank: int) -> list[_Cut]:
    rows = sliding(e.call)
    found = []
    for number, one in enumerate(rows):
        for axis in e.axes(f"{SPACE}{number}"):
            lengths, windows = one.windows(e.sizes[axis])
            found.append(_Cut(number, rank - len(rows) + number, axis, lengths, windows))
    return found


def _widened(e: Emission, x: Ref, cuts: Sequence[_Cut], fill: float = 0.0) -> Ref:
    for cut in cuts:
        x = e.halo(x, cut.dim, cut.axis, cut.lengths, cut.windows, fill)
    return x


def _summed(e: Emission, grad: Ref, cuts: Sequence[_Cut]) -> Ref:
    for cut in reversed(cuts):
        grad = e.halo_sum(grad, cut.dim, cut.axis, cut.lengths, cut.windows)
    return grad


def _unpadded(e: Emission, cuts: Sequence[_Cut]) -> tuple[int, ...]:
    """The call's padding, none in the cut dims: it is part of the windows."""
    padding = list(_each(e.call.arg("padding"), len(sliding(e.call))))
    for cut in cuts:
        padding[cut.number] = 0
    return tuple(padding)


def split_convolution(e: Emission) -> tuple[Ref | None, ...]:
    x = e.operand("input")
    cuts = _cuts(e, len(e.shape(x)))
    changes = _local_groups(e, x)
    return e.call_with(input=_widened(e, x, cuts), padding=_unpadded(e, cuts), **changes)


def _local_groups(e: Emission, x: Ref) -> dict[str, Arg]:
    """The groups that this rank holds, when there are several."""
    count = e.call.arg("groups")
    return {"groups": e.shape(x)[1] * count // e.call.shape(x.id)[1]} if count > 1 else {}


def split_convolution_backward(e: Emission) -> tuple[Ref | None, ...]:
    call, x = e.call, e.operand("input")
    cuts = _cuts(e, len(e.shape(x)))
    changes = _local_groups(e, x)
    if call.arg("bias_sizes"):
        changes["bias_sizes"] = (e.shape(Ref(0))[1],)
    of_x, *rest = e.call_with(input=_widened(e, x, cuts), padding=_unpadded(e, cuts), **changes)
    made: list[Ref | None] = [None if v.id < 0 else v for v in rest]
    return (None if of_x.id < 0 else _summed(e, of_x, cuts), *made)


def _plane(e: Emission, value: Ref) -> tuple[int, ...]:
    return e.shape(value)[len(e.shape(value)) - len(sliding(e.call)) :]


def _offsets(e: Emission, cuts: Sequence[_Cut]) -> list[int]:
    """Where this rank's window begins in the whole image."""
    offsets = [0] * len(sliding(e.call))
    for cut in cuts:
        offsets[cut.number] = cut.windows[e.coords[cut.axis]][0]
    return offsets


def split_max_pool(e: Emission) -> tuple[Ref | None, ...]:
    """Values, and their places in the whole image."""
    cuts = _cuts(e, len(e.shape(Ref(0))))
    x = _widened(e, Ref(0), cuts, -inf)
    values, places = e.call_with(self=x, padding=_unpadded(e, cuts))
    image = tuple(one.size for one in sliding(e.call))
    (moved,) = e.op("fxpar.moved_places.default", places, _plane(e, x), image, tuple(_offsets(e, cuts)))
    return values, moved


def split_max_pool_backward(e: Emission) -> tuple[Ref | None, ...]:
    grad, x, places = e.operand("grad_output"), e.operand("self"), e.operand("indices")
    cuts = _cuts(e, len(e.shape(x)))
    window = list(_plane(e, x))
    for cut in cuts:
        start, end = cut.windows[e.coords[cut.axis]]
        window[cut.number] = end - start
    image = tuple(one.size for one in sliding(e.call))
    offsets = tuple(-n for n in _offsets(e, cuts))
    (moved,) = e.op("fxpar.moved_places.default", places, image, tuple(window), offsets)
    (wide,) = e.op("fxpar.added_at_places.default", grad, moved, tuple(window))
    return (_summed(e, wide, cuts),)


def counts_padding(call: Call) -> bool:
    """True when every window of an average pooling counts equally many elements."""
    plain = not call.arg("ceil_mode")
    return plain and (bool(call.arg("count_include_pad")) or not any(call.arg("padding")))


def split_avg_pool(e: Emission) -> tuple[Ref | None, ...]:
    cuts = _cuts(e, len(e.shape(Ref(0))))
    return e.call_with(self=_widened(e, Ref(0), cuts), padding=_unpadded(e, cuts))


def split_avg_pool_backward(e: Emission) -> tuple[Ref | None, ...]:
    """Of the image only the shape is read."""
    x = e.operand("self")
    cuts = _cuts(e, len(e.shape(x)))
    shape = list(e.shape(x))
    for cut in cuts:
        start, end = cut.windows[e.coords[cut.axis]]
        shape[cut.dim] = end - start
    (blank,) = e.op("aten.new_empty.default", x, tuple(shape))
    (wide,) = e.call_with(self=blank, padding=_unpadded(e, cuts))
    return (_summed(e, wide, cuts),)
