"""The rule tables, one file per family; importing this package declares them all."""

from fxpar.rules.tables import (
    attention,
    convs,
    creation,
    embeddings,
    hub,
    indexing,
    linalg,
    log_softmax,
    losses,
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
    "convs",
    "creation",
    "embeddings",
    "hub",
    "indexing",
    "linalg",
    "log_softmax",
    "losses",
    "matmul",
    "norms",
    "pointwise",
    "random",
    "reductions",
    "slices",
    "views",
]
