"""All generators of calls: importing this declares them."""

from tests.rules import (
    calls_convs,
    calls_elementwise,
    calls_indexing,
    calls_reductions,
    calls_shapes,
    calls_whole_ops,
)

__all__ = [
    "calls_convs",
    "calls_elementwise",
    "calls_indexing",
    "calls_reductions",
    "calls_shapes",
    "calls_whole_ops",
]
