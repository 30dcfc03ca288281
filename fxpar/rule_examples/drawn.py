"""One drawn call of an op: from one of its generators, now and then with rare sizes (0 and 1) or another dtype."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import torch
from torch import Tensor

from fxpar.plans.program import Arg, Dtype
from fxpar.rule_examples.draw import GENERATORS, Draw
from fxpar.rules.soundness import Example, run_op

RARE_SIZES = 0.15
OTHER_DTYPE = 0.2
DTYPES = {torch.float64: (torch.float32, torch.bfloat16, torch.int64), torch.complex128: (torch.complex64,)}
REAL_ONLY = (
    "addm", "baddbmm", "backward", "loss", "norm", "conv", "pool", "div", "mod", "remainder", "pow", "cdist",
    "upsample", "ctc",
)
"""Parts of names of ops that get no integers: scaled by fractions they take none, and some kernels crash where they
divide by 0."""
REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)
"""What an op raises of operands that it does not take."""


def drawn_call(op: str, turn: int) -> Example:
    """The ``turn``-th call of an op (short name): always the same one, generators in turn."""
    generators = GENERATORS[op]
    generate = generators[turn % len(generators)]
    seed = zlib.crc32(f"{op} {turn}".encode())
    draw = random.Random(seed)
    kind = draw.random()
    if kind < RARE_SIZES:
        try:
            given = generate(Draw(seed, rare=True))
            run_op(given.op, given.args, given.tensors)
            return given
        except REFUSALS:
            return generate(Draw(seed))  # an op may want more than nothing
    given = generate(Draw(seed))
    if kind < RARE_SIZES + OTHER_DTYPE:
        return retyped(given, draw) or given
    return given


def retyped(given: Example, draw: random.Random) -> Example | None:
    """The call with its floating operands in another dtype, None when the op does not take it."""
    wide = [t.dtype for t in given.tensors if t.dtype in DTYPES]
    if not wide:
        return None
    target = draw.choice(DTYPES[wide[0]])
    if target is torch.int64 and any(word in given.op for word in REAL_ONLY):
        return None
    return in_dtype(given, target)


def in_dtype(given: Example, target: torch.dtype) -> Example | None:
    """The call with its wide operands in a dtype, None when the op does not take it or makes infinities of it."""
    if target is torch.int64:
        tensors, args = tuple(map(as_integers, given.tensors)), given.args
    else:
        paired = {torch.float64: target, torch.complex128: torch.complex64}
        if target is torch.complex64:
            paired[torch.float64] = torch.float32
        tensors = tuple(t.to(paired.get(t.dtype, t.dtype)) for t in given.tensors)
        args = tuple(retyped_arg(arg, {"float64": str(paired[torch.float64]).removeprefix("torch.")})
                     for arg in given.args)
    narrow = replace(given, args=args, tensors=tensors)
    try:
        results = run_op(narrow.op, narrow.args, narrow.tensors)
    except REFUSALS:
        return None
    if given.values and not all(bool(t.isfinite().all()) for t in results if t is not None):
        return None
    return narrow


def as_integers(tensor: Tensor) -> Tensor:
    """Reals rounded away from 0: a divisor stays one."""
    return tensor.abs().ceil().mul(tensor.sign()).to(torch.int64) if tensor.dtype is torch.float64 else tensor


def retyped_arg(arg: Arg, names: dict[str, str]) -> Arg:
    """A dtype argument that names a wide dtype follows the operands."""
    if isinstance(arg, Dtype):
        return Dtype(names.get(arg.name, arg.name))
    if isinstance(arg, tuple):
        return tuple(retyped_arg(item, names) for item in arg)
    return arg
