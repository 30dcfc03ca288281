"""Copies of parameters that live from forward to backward, as states of the priced problem.

A value that a parameter is read as in both halves has two hubs (``fxpar.hubs``). Each gets its states twice:

    forward hub   its layouts as before                 | HELD: the copy stays in memory until backward
    backward hub  its layouts, resharded there          | HELD: it is what the forward hub has in backward

What the forward hub has in backward is the copy it held, or, where its readers run again, the one that is made again
for them. Which states may stand together is a table between the two hubs, of no cost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from fxpar.edge_tables import moved
from fxpar.layers import Classes
from fxpar.modes import AGAIN, DROPPED, HELD, KEPT
from fxpar.plans.layout import Layout
from fxpar.plans.lifetimes import parameter_hubs
from fxpar.plans.program import Program
from fxpar.solver.problem import FORBIDDEN, IntArray


def keepable(program: Program, classes: Classes) -> dict[int, int]:
    """Backward hub -> forward hub of values that are a parameter, for classes whose members all have a partner."""
    pairs = parameter_hubs(program)
    while True:
        early, late = set(pairs.values()), set(pairs)
        hubs = {classes.nodes[n] for n in early | late}
        apart = {c for n, c in enumerate(classes.nodes) if c in hubs and n not in early and n not in late}
        left = {b: f for b, f in pairs.items() if classes.nodes[b] not in apart and classes.nodes[f] not in apart}
        if len(left) == len(pairs):
            return pairs
        pairs = left


def pinned_hub_modes(
    pairs: dict[int, int], classes: Classes, modes: Sequence[int], recompute: Collection[int]
) -> dict[int, tuple[int, int]]:
    """Per class of hubs the modes of its two halves of states when what runs again is given.

    Members of a class of forward hubs of which only some run again count as if none did: where such a reshard serves
    the backward hub, too, it is counted twice.
    """
    found: dict[int, set[int]] = {}
    for f in pairs.values():
        found.setdefault(classes.nodes[f], set()).add(modes[f] if f in recompute else DROPPED)
    hubs = {c: (next(iter(members)) if len(members) == 1 else DROPPED, HELD) for c, members in found.items()}
    return hubs | {classes.nodes[b]: (DROPPED, HELD) for b in pairs}


def pairs_allowed(
    early: Sequence[Layout], early_modes: Sequence[int], late: Sequence[Layout], late_modes: Sequence[int]
) -> IntArray:
    """[forward hub's states, backward hub's states]: 0 or FORBIDDEN."""
    f, b = np.array(early_modes)[:, None], np.array(late_modes)[None, :] == HELD
    equal = ~moved(early, late)
    repeated = (f == KEPT) | (f == AGAIN)
    allowed = np.where(f == HELD, b & equal, np.where(repeated, b == equal, ~b))
    return np.where(allowed, 0, FORBIDDEN).astype(np.int64)
