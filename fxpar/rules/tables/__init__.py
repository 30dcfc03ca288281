"""The rule tables, one file per family; importing this package declares them all."""

from fxpar.rules.tables import (
    attention,
    creation,
    embeddings,
    hub,
    matmul,
    norms,
    pointwise,
    random,
    reductions,
    slices,
    views,
)

__all__ = [
    "attention",
    "creation",
    "embeddings",
    "hub",
    "matmul",
    "norms",
    "pointwise",
    "random",
    "reductions",
    "slices",
    "views",
]
