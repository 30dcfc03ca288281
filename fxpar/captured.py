"""From a model to its program: built, captured, with hubs and logical dims, whole or as one of several microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from fxpar.accumulate import first_microbatch, repeat
from fxpar.capture import capture
from fxpar.hubs import insert_hubs
from fxpar.logical_dims import analyse
from fxpar.microbatches import batch_cuts, split_in_time
from fxpar.model_source import ModelSource
from fxpar.plans.program import Program
from fxpar.precision import float32_inputs, inputs_in_bf16, parameters_in_bf16, with_float32_surface
from fxpar.progress import Progress

Semantics = Literal["exact", "accumulate"]
Captured = tuple[Program, nn.Module]
"""A program with hubs and logical dims, and the module it was captured from."""


def capture_program(
    source: ModelSource, *, outputs: Sequence[str], precision: str, progress: Progress, microbatches: int = 1,
    semantics: Semantics = "exact",
) -> Captured:
    """Build the model (on meta where its source allows) and capture it, hubs and logical dims included.

    ``microbatches``, ``semantics``: as in :func:`compile_model`; the program is then that of one microbatch.
    """
    whole = capture_whole(source, outputs, precision, progress)
    return in_microbatches(source, whole, microbatches, semantics, outputs, precision, progress)


def in_microbatches(
    source: ModelSource, captured: Captured, count: int, semantics: Semantics, outputs: Sequence[str], precision: str,
    progress: Progress,
) -> Captured:
    """A captured program of the whole batch as one that repeats ``count`` times.

    Raises:
        FxparError: the batch does not divide, or "exact" is not to be had.
    """
    program, model = captured
    if count == 1 or program.time is not None:
        return captured
    with progress(f"cutting the batch into {count} microbatches"):
        if semantics == "exact":
            return split_in_time(program, count, batch_dim=source.batch_dim), model
        cuts = batch_cuts(program, count, source.batch_dim)
    one, _ = capture_whole(first_microbatch(source, program, count), outputs, precision, progress)
    return repeat(one, cuts, count, source.batch_dim), model


def capture_whole(source: ModelSource, outputs: Sequence[str], precision: str, progress: Progress) -> Captured:
    with progress("building the model"):
        model = build_model(source)
        args, kwargs = source.example_inputs()
    keep: Literal["all", "loss"] = "all" if "all" in outputs else "loss"
    with progress("capturing the training graph"):
        if precision == "bf16":
            with parameters_in_bf16(model) as names:
                program = capture(model, *inputs_in_bf16((args, kwargs)), loss=source.loss, outputs=keep)
            program = with_float32_surface(program, names, float32_inputs((args, kwargs)))
        else:
            program = capture(model, args, kwargs, loss=source.loss, outputs=keep)
    with progress("cutting logical dims"):
        return analyse(insert_hubs(program)), model


def build_model(source: ModelSource) -> nn.Module:
    """The model on meta for transformers configurations (they may be of any size), on the CPU for a model.py."""
    torch.manual_seed(source.seed)
    if "task" in source.meta:
        with torch.device("meta"):
            return source.build()
    return source.build()
