"""The rule tables, one file per family; importing this package declares them all."""

from fxpar.rules.tables import hub, matmul

__all__ = ["hub", "matmul"]
