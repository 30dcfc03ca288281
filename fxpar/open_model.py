"""A model as the choice of a shape wants it: its program in any number of microbatches, and that of a few layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fxpar.captured import Captured, capture_whole, in_microbatches
from fxpar.cells import Depths
from fxpar.choose import Model, measured_samples
from fxpar.microbatches import batch_size
from fxpar.model_source import ModelSource
from fxpar.plans.errors import FxparError
from fxpar.plans.program import Program
from fxpar.progress import Progress, silent
from fxpar.short_model import DEPTHS, short_sources
from fxpar.simulate import OptimizerBytes

SHORTEN = 1500
"""Nodes of a program from which on a few layers are captured apart."""
PARTS = 16
"""Equal parts that a model without stacks of layers counts as, at most."""


def open_model(
    source: ModelSource, captured: Captured, outputs: Sequence[str], precision: str, optimizer_bytes: OptimizerBytes,
    progress: Progress,
) -> Model | None:
    """What choosing a shape asks of a model; None where its batch cannot be cut in time."""
    program, model = captured
    batch = batch_size(program, source.batch_dim)
    if batch == 1 or program.time is not None:
        return None

    @cache
    def split(count: int) -> Program:
        return in_microbatches(source, captured, count, "exact", outputs, precision, silent)[0]

    try:
        split(min(n for n in range(2, batch + 1) if batch % n == 0))
    except FxparError:  # what mixes samples: batch statistics, balance losses
        return None
    short = short_sources(source, model) if len(program.nodes) > SHORTEN else None
    taken: tuple[Captured, Captured] | None = None
    if short is not None:
        with progress("capturing a few layers"):
            taken = (capture_whole(short.shallow, outputs, precision, silent),
                     capture_whole(short.deeper, outputs, precision, silent))

    @cache
    def depths(count: int) -> Depths:
        if short is None or taken is None:
            holders = {e.name.rpartition(".")[0] for e in program.inputs if e.kind == "parameter"}
            return Depths(split(count), None, 0, max(min(len(holders), PARTS), 1))
        shallow, deeper = (in_microbatches(source, t, count, "exact", outputs, precision, silent)[0] for t in taken)
        return Depths(shallow, deeper, DEPTHS[0], DEPTHS[0] + short.beyond)

    try:
        for samples in measured_samples(batch):
            depths(batch // samples)
    except FxparError:  # some part of the batch is read in pieces that do not divide so
        return None
    return Model(split, depths, batch, source.batch_dim, 0.5 if precision == "bf16" else 1.0, optimizer_bytes)
