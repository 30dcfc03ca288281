"""Deep models in the time of shallow ones: four units of every stack are traced, the rest follows from them.

That the result is what tracing the whole model would give rests on four comparisons, all of them exact:

1. the layers are equal but for their number (:mod:`fxpar.capture.equal_layers`);
2. the whole model's forward, run op by op on fake tensors, is that of the shortened model with its middle repeated
   (:mod:`fxpar.capture.op_stream`): whatever depends on a layer's number, on the depth, on a list beside the modules,
   shows here;
3. the program traced with four units, its middle taken out once, is the program traced with three, bit for bit;
4. parameters and buffers of the result are those of the whole model, in name, order, type and ties.

Where one fails, the model is traced whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from fxpar.beside import beside
from fxpar.capture.call import bind_call
from fxpar.capture.equal_layers import find_stacks, shortened
from fxpar.capture.lower import tensor_type
from fxpar.capture.op_stream import op_stream
from fxpar.capture.outputs import LossFunction
from fxpar.capture.replicate import UNITS, NotRepeated, replicate, same
from fxpar.capture.stacks import Stack
from fxpar.capture.stand_ins import evaluating, stored_tensors, unwrapped, without_compile_wrappers
from fxpar.plans.program import Program

log = logging.getLogger("fxpar.capture")

WORTH = 6
"""Layers that must be saved: seven units are traced instead of all."""

Tracer = Callable[[nn.Module], Program]


def trace_repeated(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    tracer: Tracer,
    *,
    loss: LossFunction | None,
    train: bool,
    keep_output: bool,
    at_least: int = WORTH,
) -> Program | None:
    """The program of a model with stacks of equal layers, from its first and last ones.

    Args:
        tracer: traces the model as it stands.
        at_least: layers that a stack must have beyond four units.

    Returns:
        What ``tracer(model)`` would give; None where that cannot be known without tracing the whole model.
    """
    with ExitStack() as undo:
        whole = undo.enter_context(without_compile_wrappers(model))
        if not train:
            undo.enter_context(evaluating(whole))
        stacks = find_stacks(whole, at_least=at_least)
        if not stacks:
            return None
        try:
            program = _replicated(whole, args, kwargs, tracer, stacks, loss, train, keep_output)
        except NotRepeated as why:
            log.info("the layers are traced one by one: %s", why)
            return None
    for stack in stacks:
        log.info("%s: %d of %d units traced", stack.path, UNITS, stack.units)
    return program


def _replicated(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    tracer: Tracer,
    stacks: tuple[Stack, ...],
    loss: LossFunction | None,
    train: bool,
    keep_output: bool,
) -> Program:
    units = [stack.units for stack in stacks]
    call = bind_call(unwrapped(model).forward, args, kwargs)

    def stream() -> Program:
        try:
            return op_stream(model, call, loss, stacks, train=train, keep_output=keep_output)
        except Exception as error:  # the user's model, on tensors without values; the whole trace will judge it
            raise NotRepeated(f"its forward does not run on fake tensors: {error}") from error

    def traced() -> Program:
        try:
            return tracer(model)
        except Exception as error:  # as above: what matters is what the whole model says
            raise NotRepeated(f"it cannot be traced with fewer layers: {error}") from error

    def to_compare() -> tuple[Program, Program]:
        long_stream = stream()
        with shortened(model, stacks, UNITS - 1):
            return long_stream, traced()

    # on the meta device nothing is computed: no threads of torch are needed
    compared = beside(to_compare, worthwhile=all(s.tensor.is_meta for s in stored_tensors(model).values()))
    with shortened(model, stacks, UNITS) as four:
        short_stream = stream()
        program = traced()
    long_stream, three = compared()
    if not same(replicate(short_stream, four, units), long_stream):
        raise NotRepeated("some layers do something else than others")
    if not same(replicate(program, four, [UNITS - 1] * len(stacks)), three):
        raise NotRepeated("three layers are not four without one")
    result = replicate(program, four, units)
    if stored_entries(result) != stored_of(model):
        raise NotRepeated("the parameters of the layers are in another order")
    return result


def stored_entries(program: Program) -> list[tuple[Any, ...]]:
    """What a program says of parameters and buffers."""
    return [
        (e.kind, (e.name, *e.ties), program.types[e.value], e.requires_grad, e.persistent)
        for e in program.inputs
        if e.kind in ("parameter", "buffer")
    ]


def stored_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """The same of a model."""
    return [
        (s.kind, s.names, tensor_type(s.tensor), s.kind == "parameter" and s.tensor.requires_grad, s.persistent)
        for s in stored_tensors(model).values()
    ]
