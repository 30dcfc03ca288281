"""Is a rule right? Run one concrete call under its choices on a mesh in one process, and compare with the whole op.

For every joint choice: operands are scattered by their layouts (pending sums as random summands), every rank runs its
local call, outputs are assembled by their layouts; they must equal the global op, and replicas must agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpar.plans.layout import PARTIAL_SUM, Dims, layout_text, whole_dims
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Arg, Dtype, Ref
from fxpar.rules.choices import JointChoice, Site, axis_choices, combine, joint_choices
from fxpar.rules.factor_rule import Call, Slot, torch_op
from fxpar.rules.localise import local_call
from fxpar.rules.lockstep import run_expansions
from fxpar.rules.registry import full_name, rule_for
from fxpar.rules.run_op import run_op, type_of
from fxpar.rules.virtual import Disagreement, assemble, close, scatter


@dataclass(frozen=True)
class Example:
    """A concrete call: ``args`` as in a program (operands numbered), the operands, and whether values are defined
    (an ``empty`` tensor has only a shape)."""

    op: str
    args: tuple[Arg, ...]
    tensors: tuple[Tensor, ...]
    values: bool = True


@dataclass(frozen=True)
class Counterexample:
    """A choice under which the ranks do not reproduce the op."""

    op: str
    mesh: str
    choice: tuple[str, ...]
    dims: tuple[Dims, ...]
    layouts: tuple[str, ...]
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.op} on {self.mesh} choice {'/'.join(self.choice)} dims {self.dims} "
            f"{' '.join(self.layouts)}: {self.problem}"
        )


def example(op: str, *positional: Any, values: bool = True, **keywords: Any) -> Example:
    """A call with real tensors in place of operands; arguments that are left out get the schema's defaults.

    ``op`` is short (``"mm"``, ``"add.Tensor"``, ``"fxpar::dropout"``).
    """
    name = full_name(op)
    tensors: list[Tensor] = []

    def plain(value: Any) -> Arg:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Ref(len(tensors) - 1)
        if isinstance(value, torch.dtype):
            return Dtype(str(value).removeprefix("torch."))
        if isinstance(value, (list, tuple)):
            return tuple(plain(item) for item in value)
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return None
        return value

    args = []
    for index, declared in enumerate(torch_op(name)._schema.arguments):
        if index < len(positional):
            given = positional[index]
        elif declared.name in keywords:
            given = keywords[declared.name]
        else:
            given = declared.default_value
        args.append(plain(given))
    return Example(name, tuple(args), tuple(tensors), values)


def call_of_example(given: Example, outputs: Sequence[Tensor | None]) -> Call:
    """The example as a rule sees it."""
    return Call(
        given.op,
        given.args,
        tuple(type_of(t) for t in given.tensors),
        tuple(None if t is None else type_of(t) for t in outputs),
    )


def divisors(n: int) -> list[int]:
    """Proper divisors of ``n`` above 1."""
    return [d for d in range(2, n) if n % d == 0]


def drawn_dims(call: Call, draw: random.Random, cutting: float = 0.5) -> tuple[list[Dims], list[Dims | None]]:
    """Logical dims of operands and outputs: dims are cut where a loop of the rule is, at random divisors of the loop,
    and now and then where none is."""
    shapes = [t.shape for t in call.inputs] + [() if t is None else t.shape for t in call.outputs]
    cuts: list[list[set[int]]] = [[set() for _ in shape] for shape in shapes]
    declared = rule_for(call.op)
    for group in declared.factors(call).groups if declared is not None else ():
        points = {1, group.size}
        while draw.random() < cutting:
            points.update(draw.sample(divisors(group.size), 1) if divisors(group.size) else [])
        for tensor, slot in enumerate((*group.inputs, *group.outputs)):
            if slot is not None:
                _cut_slot(cuts[tensor], shapes[tensor], slot, points)
    for tensor, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if divisors(size) and draw.random() < 0.1:
                cuts[tensor][dim].add(draw.choice(divisors(size)))
    dims = [tuple(_atoms(size, points, draw) for size, points in zip(shape, row, strict=True))
            for shape, row in zip(shapes, cuts, strict=True)]  # fmt: skip
    n = len(call.inputs)
    return dims[:n], [None if out is None else d for out, d in zip(call.outputs, dims[n:], strict=True)]


def _cut_slot(cuts: list[set[int]], shape: tuple[int, ...], slot: Slot, points: set[int]) -> None:
    prefix = 1
    for dim in slot.dims:
        for point in points:
            place = slot.lead * point
            if prefix and place % prefix == 0 and shape[dim] and shape[dim] % (place // prefix) == 0:
                cuts[dim].add(place // prefix)
        prefix *= shape[dim]


def _atoms(size: int, points: set[int], draw: random.Random) -> tuple[int, ...]:
    """A divisibility chain of the cut points, in a random order of preference, as atoms."""
    if size <= 1:
        return (0,) if size == 0 else ()
    chain = [1, size]
    for point in draw.sample(sorted(points), len(points)):
        if point not in chain and all(point % c == 0 or c % point == 0 for c in chain) and 1 < point < size:
            chain.append(point)
    chain.sort()
    return tuple(b // a for a, b in zip(chain, chain[1:], strict=False))


def check_call(
    given: Example,
    mesh: Mesh,
    *,
    seed: int = 0,
    whole: bool = False,
    limit: int = 40,
    tolerance: float = 1e-9,
    keep: Callable[[Site, JointChoice, Mesh], bool] | None = None,
) -> list[Counterexample]:
    """Counterexamples to the rule of ``given.op``: none when every choice (at most ``limit``, sampled) reproduces it.

    Args:
        given: the call; floating operands should be float64 (looser dtypes are judged by their own rounding).
        mesh: the virtual mesh.
        seed: of the logical dims, of the sample of choices and of the summands.
        whole: every tensor dim one logical dim (else cut at random where the rule has loops).
        limit: how many joint choices are run.
        tolerance: relative to the largest value of an output.
        keep: which joint choices are judged (default: all).
    """
    ran = judged_choices(given, mesh, seed=seed, whole=whole, limit=limit, tolerance=tolerance, keep=keep)
    return [problem for _, _, problem in ran if problem is not None]


def judged_choices(
    given: Example,
    mesh: Mesh,
    *,
    seed: int = 0,
    whole: bool = False,
    limit: int = 40,
    tolerance: float = 1e-9,
    keep: Callable[[Site, JointChoice, Mesh], bool] | None = None,
) -> Iterator[tuple[Site, JointChoice, Counterexample | None]]:
    """Every joint choice that is run, and what is wrong with it; arguments as in :func:`check_call`."""
    draw = random.Random(seed)
    rng = torch.Generator().manual_seed(seed)
    expected = run_op(given.op, given.args, given.tensors)
    call = call_of_example(given, expected)
    inputs, outputs = drawn_dims(call, draw)
    if whole:
        inputs = [whole_dims(t.shape) for t in call.inputs]
        outputs = [None if t is None else whole_dims(t.shape) for t in call.outputs]
    site = Site(call, tuple(inputs), tuple(outputs))
    for choice in sampled_choices(site, mesh, draw, limit, keep):
        problem = judge(given, site, choice, mesh, rng, expected, tolerance)
        if problem is None:
            yield site, choice, None
        else:
            layouts = tuple(layout_text(x) for x in (*choice.inputs, *choice.outputs))
            yield site, choice, Counterexample(given.op, str(mesh), choice.names, site.inputs, layouts, problem)


def sampled_choices(
    site: Site, mesh: Mesh, draw: random.Random, limit: int,
    keep: Callable[[Site, JointChoice, Mesh], bool] | None = None,
) -> list[JointChoice]:
    """Joint choices of the site that ``keep`` keeps: all of them, or ``limit`` drawn ones when there are more."""
    per_axis = axis_choices(site)
    if len(per_axis) ** len(mesh.axes) <= max(4 * limit, 64):
        every = [choice for choice in joint_choices(site, mesh) if keep is None or keep(site, choice, mesh)]
        return every if len(every) <= limit else draw.sample(every, limit)
    drawn = (combine(site, tuple(draw.choices(per_axis, k=len(mesh.axes))), mesh) for _ in range(2 * limit))
    return [choice for choice in drawn if choice is not None and (keep is None or keep(site, choice, mesh))][:limit]


def judge(
    given: Example,
    site: Site,
    choice: JointChoice,
    mesh: Mesh,
    rng: torch.Generator,
    expected: Sequence[Tensor | None],
    tolerance: float,
) -> str | None:
    """What is wrong with one joint choice, None when the ranks reproduce ``expected``."""
    pieces = [
        scatter(tensor, dims, layout, mesh, rng)
        for tensor, dims, layout in zip(given.tensors, site.inputs, choice.inputs, strict=True)
    ]
    rows: list[tuple[Tensor | None, ...]] = []
    rank = 0
    try:
        if choice.expands:
            rows = run_expansions(site, choice, mesh, pieces)
        for rank in range(mesh.world_size) if not choice.expands else ():
            op, args = local_call(site, choice, mesh, mesh.coordinates(rank))
            rows.append(run_op(op, args, [p[rank] for p in pieces]))
    except (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AssertionError) as error:
        # what a local call raises is exactly what is being looked for
        return f"rank {rank} cannot run: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    for index, (want, dims, layout) in enumerate(zip(expected, site.outputs, choice.outputs, strict=True)):
        if want is None or dims is None:
            continue
        got = [row[index] if index < len(row) else None for row in rows]
        held = [g for g in got if g is not None]
        if len(held) != len(got):
            return f"output {index} is missing on some rank"
        if want.dtype is torch.bool and PARTIAL_SUM in choice.outputs[index]:
            return f"output {index} is a pending sum of truth values"
        if any(h.dtype != want.dtype for h in held):
            return f"output {index} has dtype {held[0].dtype}, not {want.dtype}"
        allowed = max(tolerance, rounding(given.tensors, want))
        least = cancelling(given.tensors) / (8 if allowed > FEW_BITS else 1) if allowed > DOUBLE else 0.0
        if not given.values:
            want, held = torch.zeros_like(want), [torch.zeros_like(h) for h in held]
        try:
            whole = assemble(held, dims, layout, mesh, tolerance=allowed, least=least)
        except (Disagreement, ValueError) as error:
            return f"output {index}: {error}"
        if not close(whole, want, allowed, least=least):
            return f"output {index} differs by {gap(whole, want)}"
    return None


DOUBLE, FEW_BITS = 1e-8, 0.01
"""Tolerances above the first are those of dtypes narrower than double; above the second, of dtypes of few bits."""


def cancelling(tensors: Sequence[Tensor]) -> float:
    """The largest operand: a sum of large terms may be small, and off by what the terms round."""
    return max((float(t.abs().max()) for t in tensors if t.is_floating_point() and t.numel()), default=0.0)


def rounding(tensors: Sequence[Tensor], out: Tensor) -> float:
    """Tolerance that the coarsest dtype of a call asks for."""
    coarse = [torch.finfo(t.dtype).eps for t in (*tensors, out) if t.is_floating_point() or t.is_complex()]
    return 64 * max(coarse, default=0.0)


def gap(a: Tensor, b: Tensor) -> str:
    """The largest difference, for a message."""
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, not {tuple(b.shape)}"
    wide = torch.complex128 if a.is_complex() else torch.float64
    apart = (a.to(wide) - b.to(wide)).abs()
    return f"{float(apart.max()):.3g}" if apart.numel() else "nothing"
