"""What becomes of the forward's results, class by class, and the memory that this takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

from fxpar.copying_views import copying_views
from fxpar.layers import Classes
from fxpar.lifetimes import pinned_hub_modes
from fxpar.memory_units import units
from fxpar.modes import (
    AGAIN,
    DROPPED,
    HELD,
    KEPT,
    Kind,
    Pair,
    Part,
    crosses,
    kind_of,
    offered_modes,
    pinned_modes,
)
from fxpar.plans.layout import Dims
from fxpar.plans.program import Program
from fxpar.prices import Prices
from fxpar.recompute import layer_of
from fxpar.rules.choices import JointChoice
from fxpar.solver.problem import IntArray
from fxpar.sources import Source


@dataclass(frozen=True, eq=False)
class ClassModes:
    """What becomes of forward results, class by class.

    ``pinned``: per node, when recomputation was given, with the ``repeats`` of each class; else ``offered`` per class,
    and ``states`` (filled in with the states). ``wanted``: values that may have to be there in backward. ``hubs``: per
    class of hubs that may hold or read a copy, the modes of its states (filled in with the states); ``always``: each
    copy is held. ``stored``: classes of forward nodes whose results have storages of their own.
    """

    program: Program
    classes: Classes
    kinds: dict[int, Kind]
    pinned: tuple[int, ...]
    repeats: Counter[int]
    offered: dict[int, tuple[int, ...]]
    states: dict[int, tuple[int, ...]]
    wanted: frozenset[int]
    producer: dict[int, int]
    hubs: dict[int, tuple[int, ...]]
    always: bool
    stored: frozenset[int]

    @staticmethod
    def of(
        program: Program, classes: Classes, recompute: tuple[int, ...] | None, copies: dict[int, int],
        always: bool,
    ) -> ClassModes:
        kinds: dict[int, Kind] = {}
        for node, c in zip(program.nodes, classes.nodes, strict=True):
            if c not in kinds:
                kinds[c] = kind_of(node)
        copying = {classes.nodes[n] for n in copying_views(program)}
        stored = frozenset(c for c, kind in kinds.items() if kind == "op" or c in copying)
        producer = {v: n for n, node in enumerate(program.nodes) for v in node.outputs if v >= 0}
        if recompute is not None:
            pinned, seen = pinned_modes(program, recompute)
            repeats = Counter(c for c, mode in zip(classes.nodes, pinned, strict=True)
                              if mode == AGAIN and kinds[c] != "hub")
            hubs: dict[int, tuple[int, ...]] = dict(pinned_hub_modes(copies, classes, pinned, frozenset(recompute)))
            return ClassModes(program, classes, kinds, pinned, repeats, {}, {}, seen, producer, hubs, always,
                              stored)
        free = offered_modes(program, copies)
        found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for c, modes in zip(classes.nodes, free.modes, strict=True):
            found[c].append(modes)
        offered = {}
        for c, members in found.items():
            # what one member must keep or make again the others may not drop; a backward node has the one mode DROPPED
            most = max(members, key=len)
            must = any(m and DROPPED not in m for m in members)
            offered[c] = tuple(m for m in most if m != DROPPED or not must) or (DROPPED,)
        hubs = {classes.nodes[n]: () for pair in copies.items() for n in pair}
        return ClassModes(program, classes, kinds, (), Counter(), offered, {}, free.wanted, producer, hubs, always,
                          stored)

    def parts(self, index: int, weight: int) -> list[tuple[Part | None, int]]:
        """How often each part of the reshards of a node's operands is made."""
        if self.states or self.classes.nodes[index] not in self.hubs:
            return [(None, weight)]
        if self.program.nodes[index].phase == "backward":
            return [("late", weight)]
        return [("first", 1), *([("again", weight - 1)] if weight > 1 else [])]  # type: ignore[list-item]

    def crosses(self, value: int, reader: int) -> bool:
        """True when a value goes from one repeated layer of the forward to another."""
        maker = self.producer.get(value)
        nodes = self.program.nodes
        return (
            maker is not None and nodes[maker].phase == nodes[reader].phase == "forward"
            and crosses(self.program, maker, reader)
        )

    def pair(self, u: int, v: int, crossing: bool) -> Pair | None:
        """The modes at the ends of an edge between classes; None where they do not matter."""
        if not self.states:
            return None
        maker = self.states.get(u)
        if maker is not None and self._late(u):
            return None  # backward to backward
        late = self._late(v)
        reader = self.states[v] if not late or v in self.hubs else None
        if maker is None and reader is None:
            return None
        return Pair(maker, reader, self.kinds[v], crossing, self.kinds.get(u) == "hub", late,
                    self.always and v in self.hubs and not late)

    def _late(self, c: int) -> bool:
        return self.program.nodes[self.first[c]].phase == "backward"

    @cached_property
    def first(self) -> dict[int, int]:
        """Per class of nodes its first member."""
        return {c: n for n, c in reversed(list(enumerate(self.classes.nodes)))}

    @cached_property
    def layers(self) -> dict[int, int]:
        """Per class of nodes, over how many repeated layers its members spread."""
        found: dict[int, set[str | None]] = defaultdict(set)
        for node, c in zip(self.program.nodes, self.classes.nodes, strict=True):
            found[c].add(layer_of(node.module))
        return {c: len(layers) for c, layers in found.items()}


def add_activations(
    program: Program, modes: ClassModes, prices: Prices, source: dict[int, Source],
    node_states: dict[int, tuple[JointChoice, ...]], memory: list[IntArray], unit: int, in_flight: int = 1,
) -> None:
    """Add the bytes of kept forward values, of as many microbatches as are ``in_flight``, and of one layer's worth of
    those made again, to the classes that make them."""
    counts: Counter[tuple[int, int, int, Dims, str]] = Counter()
    for value in sorted(modes.wanted):
        s = source[value]
        if value not in modes.producer or s.owner not in modes.stored:
            continue
        pinned = modes.pinned[modes.producer[value]] if modes.pinned else KEPT
        if pinned != DROPPED:
            counts[s.owner, s.output, pinned, program.dims[value], program.types[value].dtype] += 1
    for (c, output, pinned, dims, dtype), count in counts.items():
        states = node_states[c]
        taken = modes.states[c] if modes.states else (pinned,) * len(states)
        for i, (state, mode) in enumerate(zip(states, taken, strict=True)):
            if mode != DROPPED:
                size = count * prices.stored_bytes(state.outputs[output], dims, dtype)
                memory[c][i] += units(in_flight * size if mode == KEPT else -(-size // modes.layers[c]), unit)


def add_copies(
    program: Program, modes: ClassModes, copies: dict[int, int], prices: Prices,
    node_states: dict[int, tuple[JointChoice, ...]], memory: list[IntArray], unit: int,
) -> None:
    """Add the bytes of copies that are kept from forward to backward to the hubs that make them."""
    of = modes.classes.nodes
    for f in sorted({of[f]: f for f in reversed(copies.values())}.values()):
        c, value = of[f], program.nodes[f].outputs[0]
        for i, (state, mode) in enumerate(zip(node_states[c], modes.hubs[c], strict=True)):
            if mode == HELD:
                size = prices.stored_bytes(state.outputs[0], program.dims[value], program.types[value].dtype)
                memory[c][i] += units(modes.classes.sizes[c] * size, unit)
