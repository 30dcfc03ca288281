"""A deep model with fewer layers, to learn from it what a layer costs.

Stacks of equal layers (as capture knows them) are cut to a few units. Whatever grows by the layer is then affine in
their number: measured at two depths, it is known at every other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from fxpar.capture.equal_layers import find_stacks, shorter_table
from fxpar.capture.stacks import Stack
from fxpar.model_source import ModelSource

DEPTHS = (2, 3)
"""Units of every stack of the two shortened models."""


@dataclass(frozen=True)
class ShortSources:
    """``shallow`` and ``deeper``: the model with :data:`DEPTHS` units of every stack. ``beyond``: of all units that
    ``shallow`` lacks, how many steps from ``shallow`` to ``deeper`` they are (stacks of several lengths: the mean)."""

    shallow: ModelSource
    deeper: ModelSource
    beyond: int


def short_sources(source: ModelSource, model: nn.Module) -> ShortSources | None:
    """The shortened models of a source, whose whole ``model`` is given; None where it has no stack of more than four
    equal layers."""
    stacks = find_stacks(model, at_least=1)
    if not stacks:
        return None
    lacking = sum(stack.units - DEPTHS[0] for stack in stacks)
    shallow, deeper = (_shortened(source, stacks, units) for units in DEPTHS)
    return ShortSources(shallow, deeper, round(lacking / len(stacks)))


def _shortened(source: ModelSource, stacks: tuple[Stack, ...], units: int) -> ModelSource:
    def build() -> nn.Module:
        model = source.build()
        for stack in stacks:
            module = model.get_submodule(stack.path)
            module._modules = shorter_table(module, stack, units)
        return model

    return replace(source, build=build)
