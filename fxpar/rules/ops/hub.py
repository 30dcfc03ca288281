"""``fxpar::hub``: the identity, a place where a value read by several ops may be resharded once for all of them.

A program that runs need not run it: the result is the operand. Its kernel is a view, so it costs nothing either way.
"""

from __future__ import annotations

from torch import Tensor

from fxpar.rules.ops.random import LIBRARY

HUB = "fxpar.hub.default"
"""The op's name in a program."""

LIBRARY.define("hub(Tensor(a) x) -> Tensor(a)")


def hub(x: Tensor) -> Tensor:
    """``x`` itself, as a view."""
    return x.view_as(x)


# a composite: autograd, fake tensors and every device see a view
LIBRARY.impl("hub", hub, "CompositeImplicitAutograd")
