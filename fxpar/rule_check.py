"""`fxpar rules check MODEL`: judge the rules of the calls that a captured program makes, the user's ops included.

Each distinct call is run choice by choice on virtual meshes and compared with the whole op: first on the values of a
real step, then on random floating operands of the same shapes. See `fxpar.rules.soundness` for what one judgement does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpar.capture.retype import ALL_DOUBLE, retype
from fxpar.judge_calls import ANY, Shards, judge_calls
from fxpar.model_source import ModelSource
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Node, Program, node_inputs, refs
from fxpar.progress import Progress, silent
from fxpar.reference import built, widen
from fxpar.rule_coverage import HUB, place_of
from fxpar.rule_report import Judged, RuleCheck
from fxpar.rules.factor_rule import Call, call_of
from fxpar.rules.registry import rule_for
from fxpar.rules.soundness import Example, run_op
from fxpar.runtime.interpret import call, concrete
from fxpar.step_values import input_values


def check_model(
    source: ModelSource, program: Program, meshes: Sequence[Mesh], *, examples: int = 24,
    shards: Shards = ANY, progress: Progress = silent,
) -> RuleCheck:
    """Judge every distinct call of a model's program, on values of one step in float64.

    Args:
        program: captured from the source, any dtype.
        examples: judged of every distinct call at least.
    """
    with progress("building the model in float64"):
        model = built(source, torch.float64)
        args, kwargs = widen(source.example_inputs(), torch.float64)
        wide = retype(program, ALL_DOUBLE)
        values = input_values(wide, model, args, kwargs, seed=0)
    with progress("judging every call of a step"):
        return check_program(wide, values, meshes, examples=examples, shards=shards)


def check_program(
    program: Program, values: Mapping[int, Tensor], meshes: Sequence[Mesh], *, examples: int = 24,
    shards: Shards = ANY,
) -> RuleCheck:
    """Run a program whole and judge each distinct call when it is met; equal calls are judged once."""
    judged: list[Judged] = []
    seen: set[Call] = set()
    undeclared: dict[str, None] = {}
    for node, operands in calls_of(program, values):
        made = call_of(node, program)
        if node.op == HUB or made in seen:
            continue
        seen.add(made)
        if rule_for(node.op) is None:
            undeclared[node.op] = None
            continue
        judged.append(
            judge_calls(
                node.op, drawing(node.op, made, operands), meshes, examples, shards=shards, place=place_of(node)
            )
        )
    return RuleCheck(tuple(judged), tuple(map(str, meshes)), examples, tuple(undeclared))


def drawing(op: str, made: Call, operands: Sequence[Tensor]) -> Callable[[int], Example]:
    """The calls of a node: on its operands first, then on every second turn on drawn ones if the op takes them."""

    def draw(turn: int) -> Example:
        if turn % 2 == 1:
            other = Example(op, made.args, redrawn(operands, turn // 2 + 1))
            if usable(other):
                return other
        return Example(op, made.args, tuple(operands))

    return draw


def calls_of(program: Program, values: Mapping[int, Tensor]) -> Iterator[tuple[Node, tuple[Tensor, ...]]]:
    """Every node with its operands, in program order, as one step makes them."""
    known: dict[int, Any] = dict(values)
    last_use = {v: n for n, node in enumerate(program.nodes) for arg in node.args for v in refs(arg)}
    with torch.no_grad():
        for n, node in enumerate(program.nodes):
            # rules are judged on operands of plain strides, as ranks hold them
            yield node, tuple(known[v].contiguous() for v in node_inputs(node))
            result = call(node.op, [concrete(arg, known) for arg in node.args], torch.device("cpu"))
            for value, tensor in zip(node.outputs, result if isinstance(result, tuple | list) else (result,),
                                     strict=True):
                if value >= 0:
                    known[value] = tensor
            for value in node_inputs(node):
                if last_use[value] == n:
                    known.pop(value, None)


def redrawn(operands: Sequence[Tensor], turn: int) -> tuple[Tensor, ...]:
    """Floating operands replaced by odd multiples of 1/128 (never 0: sums of infinities are nothing), all positive on
    every second turn; integers and masks stay: only the model knows which ones an op takes."""
    generator = torch.Generator().manual_seed(turn)
    drawn = []
    for tensor in operands:
        if not tensor.is_floating_point():
            drawn.append(tensor)
            continue
        value = (torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 64).round() / 64 + 1 / 128
        drawn.append((value.abs() if turn % 2 == 0 else value).to(tensor.dtype))
    return tuple(drawn)


def usable(given: Example) -> bool:
    """True when the whole op takes the operands and all that comes out is finite."""
    try:
        results = run_op(given.op, given.args, given.tensors)
    except (RuntimeError, ValueError, ArithmeticError, LookupError):
        return False  # random operands may lie outside an op's domain
    return all(bool(t.isfinite().all()) for t in results if t is not None and t.is_floating_point())

