"""Nodes and inputs of repeated layers, tied into classes that share one decision.

Nodes of ``layers.0.mlp`` and ``layers.17.mlp`` have the same class when they have the same op, arguments, shapes and
logical dims, and as many such nodes come before them in their layer (what one layer computes for all of them does not
shift the places of its other nodes). Tying is a constraint, never a claim: a tied plan is a plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from fxpar.plans.program import Program
from fxpar.rules.choices import Site, sites_of

# Every problem of a search is made from the same program, and hashing one takes as long as tying it.
_latest: dict[bool, tuple[Program, Classes]] = {}
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Classes:
    """``nodes[n]`` and ``inputs[i]`` are class ids (one numbering for both); ``sizes[c]`` counts members.

    ``sites[n]`` is the site of node ``n`` (equal for all members of a class).
    """

    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    sizes: tuple[int, ...]
    sites: tuple[Site, ...]


def layer_key(path: str) -> str:
    """A dotted path with its numbers replaced: ``"layers.3.mlp"`` -> ``"layers.*.mlp"``."""
    return _NUMBER.sub("*", path)


def tie_layers(program: Program, *, tied: bool = True) -> Classes:
    """Classes of a program's nodes and inputs; every one its own class when not ``tied``."""
    known = _latest.get(tied)
    if known is not None and known[0] is program:
        return known[1]
    sites = sites_of(program)
    ordinal: Counter[tuple[str, str, Site]] = Counter()
    ids: dict[Hashable, int] = {}
    nodes, inputs = [], []
    for index, (node, site) in enumerate(zip(program.nodes, sites, strict=True)):
        place = (node.module, node.phase, site)
        key: Hashable = (layer_key(node.module), node.phase, ordinal[place], site) if tied else index
        ordinal[place] += 1
        nodes.append(ids.setdefault(key, len(ids)))
    for index, item in enumerate(program.inputs):
        kind, dims = program.types[item.value], program.dims[item.value]
        key = (item.kind, layer_key(item.name), kind, dims, item.requires_grad) if tied else ("input", index)
        inputs.append(ids.setdefault(key, len(ids)))
    counts = Counter([*nodes, *inputs])
    classes = Classes(tuple(nodes), tuple(inputs), tuple(counts[c] for c in range(len(ids))), sites)
    _latest[tied] = (program, classes)
    return classes
