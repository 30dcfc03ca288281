"""Example calls of every op with a rule: what `fxpar rules check` and the tests judge rules on.

Importing this fills `draw.GENERATORS`: per op (short name) the functions from a seeded `Draw` to an `Example`.
"""

from fxpar.rule_examples import convs, elementwise, experts, indexing, log_softmax, reductions, shapes, whole_ops

__all__ = ["convs", "elementwise", "experts", "indexing", "log_softmax", "reductions", "shapes", "whole_ops"]
