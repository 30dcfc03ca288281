"""Parts of a max pooling that one rank computes when the image is cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxpar.rules.ops.random import LIBRARY

LIBRARY.define("moved_places(Tensor places, int[] old, int[] new, int[] by) -> Tensor")
LIBRARY.define("added_at_places(Tensor grad, Tensor places, int[] shape) -> Tensor")


def moved_places(places: Tensor, old: Sequence[int], new: Sequence[int], by: Sequence[int]) -> Tensor:
    """Linear places in a grid of sizes ``old`` as places in a grid of sizes ``new`` that begins ``by`` before it.

    A place that would lie before the new grid's beginning (padding) is moved to it.
    """
    result = torch.zeros_like(places)
    rest, factor = places, 1
    for size, other, offset in zip(reversed(old), reversed(new), reversed(by), strict=True):
        result = result + (rest % size + offset).clamp(0, other - 1) * factor
        rest, factor = torch.div(rest, size, rounding_mode="floor"), factor * other
    return result


def added_at_places(grad: Tensor, places: Tensor, shape: Sequence[int]) -> Tensor:
    """``[..., *shape]``: zeros to which every element of ``grad`` is added at its linear place."""
    lead = grad.shape[: grad.dim() - len(shape)]
    flat = grad.new_zeros(*lead, torch.Size(shape).numel())
    start = len(lead)
    return flat.scatter_add_(-1, places.flatten(start), grad.flatten(start)).reshape(*lead, *shape)


for _name, _function in (("moved_places", moved_places), ("added_at_places", added_at_places)):
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
