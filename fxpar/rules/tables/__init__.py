"""The rule tables, one file per family; importing this package declares them all."""

from fxpar.rules.tables import matmul

__all__ = ["matmul"]
