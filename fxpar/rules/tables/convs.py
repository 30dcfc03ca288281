"""Convolutions, pooling and resampling: samples and channels are loops. Space is a loop where windows slide over it
(neighbours exchange rows, see :mod:`fxpar.rules.expansions.windows`); resampled and transposed, it stays whole.

Channels with ``groups`` are ``c = (G c')`` and ``o = (G o')``: the groups are a loop of all operands; with one group
``o`` is a loop and ``c`` is contracted. A dim that the kernel tiles without padding or overlap is ``(h k!)``.
"""

from __future__ import annotations

from collections.abc import Callable

from fxpar.plans.program import Arg
from fxpar.rules.expansions.windows import (
    counts_padding,
    neighbours_suffice,
    space_loops,
    split_avg_pool,
    split_avg_pool_backward,
    split_convolution,
    split_convolution_backward,
    split_max_pool,
    split_max_pool_backward,
)
from fxpar.rules.factor_rule import Block, Call, Factors, Group, Slot
from fxpar.rules.groups import Region, loop, passes
from fxpar.rules.registry import rule


def _groups(
    call: Call,
    data: dict[int, str],
    results: dict[int, str],
    sums: dict[str, dict[int, str]],
    bias: int | None,
    source: int,
    weight: int,
) -> tuple[Group, ...]:
    """Loops of a convolution. ``data`` / ``results`` give the role of every operand and output: ``x`` (input side),
    ``y`` (output side), ``w`` (weight), ``b`` (bias). ``sums`` names, per loop, the outputs that become pending."""
    count, flipped = call.arg("groups"), call.arg("transposed")
    shape, kernel = call.shape(source), call.shape(weight)
    c = shape[1]
    o = kernel[1] * count if flipped else kernel[0]

    def places(where: dict[str, Region]) -> tuple[dict[int, Region], dict[int, Region]]:
        return (
            {i: where[role] for i, role in data.items() if role in where},
            {k: where[role] for k, role in results.items() if role in where},
        )

    def turn(name: str, size: int, where: dict[str, Region]) -> tuple[Group, ...]:
        inputs, outputs = places(where)
        waiting = {k: "sum" for k, role in results.items() if k in sums[name] and role not in where}
        added = (bias,) if bias is not None and name == "c" else ()
        return loop(call, size, inputs, outputs, contract=waiting, addends=added, nonempty=True)

    result = turn("n", shape[0], {"x": 0, "y": 0})
    if count > 1:
        part, made = Slot((1,), 1, c // count), Slot((1,), 1, o // count)
        kernels = Slot((0,), 1, kernel[0] // count)
        result += turn("g", count, {"x": part, "y": made, "w": kernels, "b": Slot((0,), 1, o // count)})
    else:
        result += turn("o", o, {"y": 1, "w": 1 if flipped else 0, "b": 0})
        result += turn("c", c, {"x": 1, "w": 0 if flipped else 1})
    if not flipped:
        for d, (stride, pad, dilation) in enumerate(zip(*_windows(call, len(kernel) - 2), strict=True)):
            width, size = kernel[d + 2], shape[d + 2]
            if pad == 0 and dilation == 1 and stride == width and size % width == 0:
                result += turn("s", size // width, {"x": Slot((d + 2,), 1, width), "y": d + 2})
    return result


def _windows(call: Call, dims: int) -> tuple[tuple[int, ...], ...]:
    """Stride, padding, dilation of every spatial dim (one number stands for all)."""
    rows = []
    for name in ("stride", "padding", "dilation"):
        given = tuple(call.arg(name))
        rows.append(given * dims if len(given) == 1 else given)
    return tuple(rows)


def convolution(call: Call) -> Factors:
    bias = call.operand("bias")
    data = {0: "x", 1: "w"} | ({bias: "b"} if bias is not None else {})
    sums: dict[str, dict[int, str]] = {"n": {}, "g": {}, "o": {}, "c": {0: "sum"}, "s": {}}
    groups = _groups(call, data, {0: "y"}, sums, bias, 0, 1)
    if not call.arg("transposed"):
        groups += space_loops(call, (0,), (0,), {}, skip_patches=True)
    # with a bias the op is affine: a pending input needs a pending bias beside it
    return Factors(groups, passes(call, "0", "1") if bias is None else passes(call, "02", "12"))


def convolution_backward(call: Call) -> Factors:
    """``dy, x, w -> dx, dw, db``: dx reads no x, dw no w, db only dy."""
    roles = {0: "x", 1: "w", 2: "b"}
    results = {k: role for k, role in roles.items() if call.outputs[k] is not None}
    sums: dict[str, dict[int, str]] = {
        "n": {1: "sum", 2: "sum"}, "g": {}, "o": {0: "sum"}, "c": {}, "s": {1: "sum", 2: "sum"},
    }  # fmt: skip
    groups = _groups(call, {0: "y", 1: "x", 2: "w"}, results, sums, None, 1, 2)
    if not call.arg("transposed"):
        summed = {k: "sum" for k in results if k > 0}
        groups += space_loops(call, (0, 1), (0,) if 0 in results else (), summed, skip_patches=True)
    return Factors(groups, passes(call, "0", "1>1", "2>0"))


def local_convolution(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    count = call.arg("groups")
    changes: dict[str, Arg] = {}
    backward = call.op == "aten.convolution_backward.default"
    if count > 1:
        source = 1 if backward else 0
        changes["groups"] = block.input_shape(source)[1] * count // call.shape(source)[1]
    if backward and call.arg("bias_sizes"):
        changes["bias_sizes"] = (block.input_shape(0)[1],)
    return call.op, call.with_args(**changes)


rule(
    "convolution", convolution, localise=local_convolution, expand=split_convolution, offers=neighbours_suffice
)
rule(
    "convolution_backward", convolution_backward, localise=local_convolution, expand=split_convolution_backward,
    offers=neighbours_suffice,
)  # fmt: skip


def planes(linear: tuple[str, ...] = (), spatial: int = 2) -> Callable[[Call], Factors]:
    """Every dim before the last ``spatial`` ones is a loop of all operands and outputs of full rank."""

    def factors(call: Call) -> Factors:
        rank = max(len(t.shape) for t in call.inputs)
        shape = next(t.shape for t in call.inputs if len(t.shape) == rank)
        full = [i for i, t in enumerate(call.inputs) if len(t.shape) == rank]
        outputs = [o for o, out in enumerate(call.outputs) if out is not None]
        groups: tuple[Group, ...] = ()
        for d in range(rank - spatial):
            groups += loop(call, shape[d], dict.fromkeys(full, d), dict.fromkeys(outputs, d), nonempty=True)
        return Factors(groups, passes(call, *linear))

    factors.__name__ = "planes"
    return factors



def slid(inputs: tuple[int, ...], linear: tuple[str, ...], spatial: int) -> Callable[[Call], Factors]:
    """:func:`planes` of which space is a loop, too: of the operands ``inputs`` and all outputs."""

    def factors(call: Call) -> Factors:
        plain = planes(linear, spatial)(call)
        if call.has("count_include_pad") and not counts_padding(call):
            return plain
        outputs = [o for o, out in enumerate(call.outputs) if out is not None]
        return Factors((*plain.groups, *space_loops(call, inputs, outputs, {}, skip_patches=False)), plain.linear)

    factors.__name__ = "slid"
    return factors


rule("adaptive_max_pool1d", planes(spatial=1))
for n in (1, 2, 3):
    rule(f"avg_pool{n}d", slid((0,), ("0",), n), expand=split_avg_pool, offers=neighbours_suffice)
for n in (2, 3):
    rule(f"avg_pool{n}d_backward", slid((0, 1), ("0",), n), expand=split_avg_pool_backward, offers=neighbours_suffice)
    rule(f"max_pool{n}d_with_indices", slid((0,), (), n), expand=split_max_pool, offers=neighbours_suffice)
    rule(
        f"max_pool{n}d_with_indices_backward", slid((0, 1, 2), ("0",), n), expand=split_max_pool_backward,
        offers=neighbours_suffice,
    )  # fmt: skip
    rule(f"adaptive_max_pool{n}d", planes(spatial=n))
    rule(f"adaptive_max_pool{n}d_backward", planes(("0",), n))
    rule([f"_adaptive_avg_pool{n}d{end}" for end in ("", "_backward")], planes(("0",), n))

_RESAMPLED = {"nearest": (1, 2, 3), "_nearest-exact": (1, 2, 3), "linear": (1,), "bilinear": (2,), "trilinear": (3,),
              "bicubic": (2,)}  # fmt: skip
for kind, spatial_dims in _RESAMPLED.items():
    for n in spatial_dims:
        name = f"upsample_{kind}{n}d" if "nearest" in kind else f"upsample_{kind}{'1d' if n == 1 else f'{n}d'}"
        name = name.replace("upsample__nearest-exact", "_upsample_nearest_exact")
        rule(name, planes(("0",), n))
rule(["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"], planes(("0",), 2))


def local_resampled_backward(call: Call, block: Block) -> tuple[str, tuple[Arg, ...]]:
    return call.op, call.with_args(input_size=block.output_shape())


for kind, spatial_dims in _RESAMPLED.items():
    for n in spatial_dims:
        name = f"upsample_{kind}{n}d_backward".replace("upsample__nearest-exact", "_upsample_nearest_exact")
        rule(name, planes(("0",), n), localise=local_resampled_backward)

rule(["pixel_shuffle", "pixel_unshuffle"], planes(("0",), 3))


def grid_sample(call: Call) -> Factors:
    """``x [n,c,h,w], grid [n,h',w',2] -> [n,c,h',w']``: samples, channels and output space are loops."""
    x, grid = call.shape(0), call.shape(1)
    groups = loop(call, x[0], {0: 0, 1: 0}, {0: 0}, nonempty=True)
    groups += loop(call, x[1], {0: 1}, {0: 1}, nonempty=True)
    for d, size in enumerate(grid[1:-1]):
        groups += loop(call, size, {1: d + 1}, {0: d + 2}, nonempty=True)
    return Factors(groups, passes(call, "0"))


rule(["grid_sampler_2d", "grid_sampler_3d"], grid_sample)


def grid_sample_backward(call: Call) -> Factors:
    """``dy, x, grid -> dx, dgrid``: dgrid sums over channels, dx over the output space."""
    x, grid = call.shape(1), call.shape(2)
    made = {o for o, out in enumerate(call.outputs) if out is not None}
    groups = loop(call, x[0], {0: 0, 1: 0, 2: 0}, {o: 0 for o in made}, nonempty=True)
    groups += loop(
        call, x[1], {0: 1, 1: 1}, {0: 1} if 0 in made else {}, contract={1: "sum"} if 1 in made else {}, nonempty=True
    )
    for d, size in enumerate(grid[1:-1]):
        groups += loop(
            call, size, {0: d + 2, 2: d + 1}, {1: d + 1} if 1 in made else {}, contract={0: "sum"} if 0 in made else {},
            nonempty=True,
        )  # fmt: skip
    return Factors(groups, passes(call, "0"))


rule(["grid_sampler_2d_backward", "grid_sampler_3d_backward"], grid_sample_backward)


def im2col(call: Call) -> Factors:
    """``[n, c, h, w] <-> [n, (c k!), l!]``: samples and channels are loops."""
    patches = 0 if call.op == "aten.col2im.default" else None
    kernel = 1
    for width in call.arg("kernel_size"):
        kernel *= width
    image, columns = (call.out_shape(), call.shape(0)) if patches == 0 else (call.shape(0), call.out_shape())
    if len(image) != 4:
        return Factors((), passes(call, "0"))
    groups = loop(call, image[0], {0: 0}, {0: 0}, nonempty=True)
    packed, plain = Slot((1,), 1, kernel), 1
    left, right = (packed, plain) if len(columns) == len(call.shape(0)) and patches == 0 else (plain, packed)
    groups += loop(call, image[1], {0: left}, {0: right}, nonempty=True)
    return Factors(groups, passes(call, "0"))


rule(["im2col", "col2im"], im2col)
