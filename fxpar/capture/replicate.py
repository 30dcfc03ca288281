"""A program of a few layers -> the program of many.

``replicate`` takes the program of a model whose stacks have four units each and gives the one that a trace of longer
(or shorter) stacks would give, or refuses. The two middle units must be the same nodes, reading the same values:

    inputs    .. w0 w1 w2 w3 ..          each of its own unit          w1, w2: unit 1, 2
    forward   .. F0 F1 F2 F3 ..          of the unit before            F2 reads F1 where F1 reads F0
    backward  .. B3 B2 B1 B0 ..          of the unit after             B1 reads B2 where B2 reads B3
    outputs   .. g0 g1 g2 g3 ..          one value outside of them     F1 and F2 read the mask

Only the middle is repeated; the first and the last unit, and everything around, stay as they were traced. Whether four
units are enough to know the fifth is not judged here (:mod:`fxpar.capture.repeated_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from fxpar.capture.numbering import DRAWS, number_draws, renumber, replaced
from fxpar.capture.stacks import Place, Stack, name_at, place_of
from fxpar.plans.program import Arg, Input, Node, Output, Program, Ref, TensorType

UNITS = 4
"""Units that the short program has: a first, two middle ones to compare, a last."""

LOW, HIGH = 1, 2
"""The middle units of the short program."""


class NotRepeated(Exception):
    """The program is not that of repeated layers; says where it departs. Not an error: the model is traced whole."""


Item = Input | Node | Output
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Run:
    """The middle units in one part of the program: ``low`` and ``high`` are where their items start, ``length`` each.

    ``descending``: the high unit comes first (backward).
    """

    stack: int
    low: int
    high: int
    length: int

    @property
    def descending(self) -> bool:
        return self.high < self.low


@dataclass(frozen=True)
class Fixed:
    """A value outside of the middle units, by its number in the short program."""

    value: int


@dataclass(frozen=True)
class InUnit:
    """The value number ``offset`` of a unit of a run: of the ``shift``-th unit after the reader's.

    ``edge``: the value that the first reader in the chain, whose neighbour is no middle unit, reads instead.
    """

    run: int
    offset: int
    shift: int
    edge: int = -1


@dataclass(frozen=True)
class AtEnd:
    """The value number ``offset`` of a run's lowest (``LOW``) or highest (``HIGH``) middle unit."""

    run: int
    offset: int
    unit: int


Use = Fixed | InUnit | AtEnd


@dataclass(frozen=True)
class Template:
    """An item with what it reads and what it is called, independent of the number of units.

    ``uses`` in the order of its refs (an input has none); ``names`` are its names, a place where they go through a
    stack (``unit`` then counts from the reader's for an item of a middle unit). ``makes``: types of what it defines.
    """

    item: Item
    uses: tuple[Use, ...]
    names: tuple[str | Place, ...]
    makes: tuple[TensorType, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Templates that stand once (``run`` -1), or once for every middle unit of a run."""

    run: int
    templates: tuple[Template, ...]


def replicate(short: Program, stacks: Sequence[Stack], units: Sequence[int]) -> Program:
    """The program of longer or shorter stacks.

    Args:
        short: a captured program, without logical dims, whose ``stacks`` have four units each.
        units: units per stack wanted, at least 3.

    Raises:
        NotRepeated: the middle units differ, or something reads the units in a way that does not repeat.
    """
    if any(stack.units != UNITS for stack in stacks) or min(units, default=UNITS) < UNITS - 1 or short.dims:
        raise ValueError(f"replicate wants a program without dims, of {UNITS} units, and 3 or more of them")
    program = renumber(without_draw_numbers(short))
    parts, runs = Reading(program, tuple(stacks)).parts()
    wanted = tuple(replace(stack, units=count) for stack, count in zip(stacks, units, strict=True))
    return renumber(number_draws(Writing(program, runs, wanted).program(parts)))


def same(one: object, other: object) -> bool:
    """Equality of plain data that tells 0, 0.0 and False apart."""
    return msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)


def without_draw_numbers(program: Program) -> Program:
    """The inverse of ``number_draws``: op ids count all draws of the program, and are given again at the end."""
    seeds = {entry.value for entry in program.inputs if entry.kind == "seed"}

    def cleared(node: Node) -> Node:
        if node.op not in DRAWS:
            return node
        seed_at, id_at, _ = DRAWS[node.op]
        return msgspec.structs.replace(node, args=replaced(node.args, {seed_at: None, id_at: 0}))

    return msgspec.structs.replace(
        program,
        inputs=tuple(entry for entry in program.inputs if entry.value not in seeds),
        nodes=tuple(cleared(node) for node in program.nodes),
    )


def names_of(item: Item) -> tuple[str, ...]:
    """The names that may go through a layer."""
    if isinstance(item, Node):
        return (item.module,)
    if isinstance(item, Input):
        return (item.name, *item.ties) if item.kind in ("parameter", "buffer") else ()
    return (item.name,) if item.kind in ("gradient", "buffer") else ()


def renamed(item: Item, names: tuple[str, ...]) -> Item:
    if isinstance(item, Node):
        return msgspec.structs.replace(item, module=names[0])
    if not names:
        return item
    if isinstance(item, Input):
        return msgspec.structs.replace(item, name=names[0], ties=names[1:])
    return msgspec.structs.replace(item, name=names[0])


def used(item: Item) -> tuple[int, ...]:
    """Values that an item reads."""
    if isinstance(item, Node):
        return tuple(_refs(item.args))
    return (item.value,) if isinstance(item, Output) and item.value >= 0 else ()


def defined(item: Item) -> tuple[int, ...]:
    """Values that an item makes."""
    if isinstance(item, Node):
        return tuple(v for v in item.outputs if v >= 0)
    return (item.value,) if isinstance(item, Input) else ()


def blank(item: Item) -> Item:
    """The item with every value and name taken out: what the middle units must have in common."""
    if isinstance(item, Node):
        args = _mapped(item.args, lambda _: 0)
        return msgspec.structs.replace(item, args=args, outputs=tuple(min(v, 0) for v in item.outputs), module="")
    bare = renamed(item, ("",) * len(names_of(item)))
    return msgspec.structs.replace(bare, value=min(item.value, 0))


def _refs(args: Sequence[Arg]) -> Iterator[int]:
    for arg in args:
        if isinstance(arg, Ref):
            yield arg.id
        elif isinstance(arg, tuple):
            yield from _refs(arg)


def _mapped(args: tuple[Arg, ...], new: Callable[[int], int]) -> tuple[Arg, ...]:
    return tuple(
        Ref(new(a.id)) if isinstance(a, Ref) else _mapped(a, new) if isinstance(a, tuple) else a for a in args
    )


class Sweeps:
    """Finds where the units of one stack begin, in a sequence that passes them in order, up or down, maybe often.

    A unit begins at the first item that bears its name; items that bear a name of a unit already passed (sums of
    gradients) belong where they stand.
    """

    def __init__(self, places: Sequence[int | None]) -> None:
        self.places = places

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(start of the low unit, start of the high unit, length) of every sweep.

        Raises:
            NotRepeated: a unit is passed over, or a sweep does not reach the end, or the middle units differ in length.
        """
        last = UNITS - 1
        starts: dict[int, int] = {}
        up = True
        current = -1  # before the first sweep; 0 or `last` when one is complete
        for position, unit in enumerate(self.places):
            if unit is None or unit == current:
                continue
            if current in (-1, 0 if not up else last) and not starts:
                if current == -1 or unit in (0, last):
                    up = unit == 0
                    if unit not in (0, last):
                        raise NotRepeated(f"the layers begin with unit {unit}")
                else:  # turns round at the end: the unit it stands in is the first of the next sweep
                    up = not up
                    if unit != current + (1 if up else -1):
                        raise NotRepeated(f"unit {unit} follows unit {current}")
                    starts[unit] = position
                current = unit
                continue
            step = 1 if up else -1
            if unit == current + step:
                current = unit
                starts[unit] = position
                if current == (last if up else 0):
                    ends = starts[HIGH + 1] if up else starts[LOW - 1]
                    yield self._lengths(starts, ends, up)
                    starts = {}
            elif (unit - current) * step > 0:
                raise NotRepeated(f"unit {unit} follows unit {current}")
        if starts:
            raise NotRepeated("the layers are not passed to their end")

    def _lengths(self, starts: dict[int, int], end: int, up: bool) -> tuple[int, int, int]:
        early, late = (LOW, HIGH) if up else (HIGH, LOW)
        length = starts[late] - starts[early]
        if end - starts[late] != length:
            raise NotRepeated(f"two layers have {length} and {end - starts[late]} items")
        return starts[LOW], starts[HIGH], length


class Reading:
    """The short program as templates."""

    def __init__(self, program: Program, stacks: tuple[Stack, ...]) -> None:
        self.program = program
        self.stacks = stacks
        self.items: tuple[Item, ...] = (*program.inputs, *program.nodes, *program.outputs)
        self.runs: list[Run] = []
        self.run_at: dict[int, tuple[int, int]] = {}  # item in a middle unit -> (run, unit)
        # value in a middle unit -> (run, unit, number within the unit)
        self.coordinate: dict[int, tuple[int, int, int]] = {}

    def parts(self) -> tuple[tuple[Part, ...], tuple[Run, ...]]:
        """The whole program, in order."""
        self._find_runs()
        self._locate_values()
        parts: list[Part] = []
        plain: list[Template] = []
        position = 0
        while position < len(self.items):
            if position not in self.run_at:
                plain.append(self._outside(position))
                position += 1
                continue
            index = self.run_at[position][0]
            run = self.runs[index]
            parts += [Part(-1, tuple(plain)), Part(index, tuple(self._middle(index, i) for i in range(run.length)))]
            plain = []
            position += 2 * run.length
        return (*parts, Part(-1, tuple(plain))), tuple(self.runs)

    def _find_runs(self) -> None:
        inputs, nodes = len(self.program.inputs), len(self.program.nodes)
        sections = ((0, inputs), (inputs, inputs + nodes), (inputs + nodes, len(self.items)))
        for start, end in sections:
            places = [self._unit_of(item) for item in self.items[start:end]]
            for stack in range(len(self.stacks)):
                own = [p.unit if p is not None and p.stack == stack else None for p in places]
                for low, high, length in Sweeps(own).runs():
                    self._add(Run(stack, start + low, start + high, length))

    def _unit_of(self, item: Item) -> Place | None:
        names = names_of(item)
        found = {(p.stack, p.unit): p for n in names if (p := place_of(n, self.stacks)) is not None}
        if len(found) > 1 or (found and len(names) > 1 and any(place_of(n, self.stacks) is None for n in names)):
            raise NotRepeated(f"{names[0]} is tied to {', '.join(names[1:])}")
        return next(iter(found.values()), None)

    def _add(self, run: Run) -> None:
        for unit, start in ((LOW, run.low), (HIGH, run.high)):
            for position in range(start, start + run.length):
                if position in self.run_at:
                    raise NotRepeated("the layers of two stacks are interleaved")
                self.run_at[position] = (len(self.runs), unit)
        self.runs.append(run)

    def _locate_values(self) -> None:
        for index, run in enumerate(self.runs):
            for unit, start in ((LOW, run.low), (HIGH, run.high)):
                values = [v for item in self.items[start : start + run.length] for v in defined(item)]
                self.coordinate.update((value, (index, unit, offset)) for offset, value in enumerate(values))

    def _outside(self, position: int) -> Template:
        item = self.items[position]
        names: list[str | Place] = []
        for name in names_of(item):
            place = place_of(name, self.stacks)
            if place is not None and place.unit in (LOW, HIGH):
                raise NotRepeated(f"{_title(item)} stands outside of its layer")
            names.append(name if place is None else place)
        uses: list[Use] = []
        for value in used(item):
            if value in self.coordinate:
                run, unit, offset = self.coordinate[value]
                uses.append(AtEnd(run, offset, unit))
            else:
                uses.append(Fixed(value))
        return self._template(item, uses, names)

    def _middle(self, index: int, offset: int) -> Template:
        run = self.runs[index]
        low, high = self.items[run.low + offset], self.items[run.high + offset]
        if type(low) is not type(high) or not same(blank(low), blank(high)):
            raise NotRepeated(f"{_title(low)} and {_title(high)} differ")
        if [self.program.types[v] for v in defined(low)] != [self.program.types[v] for v in defined(high)]:
            raise NotRepeated(f"the results of {_title(low)} and {_title(high)} differ")
        uses = [
            self._use(run, a, b, low) for a, b in zip(used(low), used(high), strict=True)
        ]
        names = [self._name(run, a, b) for a, b in zip(names_of(low), names_of(high), strict=True)]
        return self._template(low, uses, names)

    def _use(self, run: Run, low: int, high: int, item: Item) -> Use:
        """What ``item`` reads, from the values that the low and the high unit read in its place."""
        one, two = self.coordinate.get(low), self.coordinate.get(high)
        if one is None and two is None:
            if low == high:
                return Fixed(low)
        elif one is None and two is not None:
            if two[1] == LOW and self.runs[two[0]].stack == run.stack:
                return InUnit(two[0], two[2], -1, low)
        elif one is not None and two is None:
            if one[1] == HIGH and self.runs[one[0]].stack == run.stack:
                return InUnit(one[0], one[2], 1, high)
        elif one is not None and two is not None:
            alike = (one[0], one[2]) == (two[0], two[2]) and (one[1], two[1]) == (LOW, HIGH)
            if alike and self.runs[one[0]].stack == run.stack:
                return InUnit(one[0], one[2], 0)
        raise NotRepeated(f"{_title(item)} does not read the same in every layer")

    def _name(self, run: Run, low: str, high: str) -> str | Place:
        """Both names in terms of the unit they are in."""
        one, two = place_of(low, self.stacks), place_of(high, self.stacks)
        if one is None or two is None:
            if low == high:
                return low
        elif one == two:
            if one.unit not in (LOW, HIGH):
                return one
        elif one.unit is not None and two.unit is not None and one.stack == two.stack == run.stack:
            # a unit counted from the reader's own: told apart from the above by its `layer` being negative
            if two.unit - one.unit == 1 and (one.layer, one.rest) == (two.layer, two.rest):
                return Place(one.stack, one.unit - LOW, -1 - one.layer, one.rest)
        raise NotRepeated(f"{low} and {high} are not named alike")

    def _template(self, item: Item, uses: Sequence[Use], names: Sequence[str | Place]) -> Template:
        values = defined(item)
        return Template(item, tuple(uses), tuple(names), tuple(self.program.types[v] for v in values), values)


def _title(item: Item) -> str:
    if isinstance(item, Node):
        return f"{item.op} of {item.module or 'the model'} ({item.phase}, {item.source})"
    return f"{item.kind} {item.name}"


class Writing:
    """Templates as a program of so many units."""

    def __init__(self, short: Program, runs: tuple[Run, ...], stacks: tuple[Stack, ...]) -> None:
        self.short = short
        self.runs = runs
        self.stacks = stacks
        self.types: list[TensorType] = []
        self.fixed: dict[int, int] = {}
        self.in_unit: dict[tuple[int, int, int], int] = {}

    def program(self, parts: tuple[Part, ...]) -> Program:
        items: list[Item] = []
        for part in parts:
            if part.run < 0:
                items += [self._written(t, -1, 0, 0) for t in part.templates]
                continue
            run = self.runs[part.run]
            middle = range(1, self.stacks[run.stack].units - 1)
            for unit in reversed(middle) if run.descending else middle:
                offset = 0
                for template in part.templates:
                    items.append(self._written(template, part.run, unit, offset))
                    offset += len(template.values)
        return msgspec.structs.replace(
            self.short,
            types=tuple(self.types),
            inputs=tuple(i for i in items if isinstance(i, Input)),
            nodes=tuple(i for i in items if isinstance(i, Node)),
            outputs=tuple(i for i in items if isinstance(i, Output)),
        )

    def _written(self, template: Template, run: int, unit: int, offset: int) -> Item:
        item = template.item
        reads = iter([self._value(use, unit) for use in template.uses])
        made: dict[int, int] = {}
        for number, (old, kind) in enumerate(zip(template.values, template.makes, strict=True)):
            made[old] = len(self.types)
            self.types.append(kind)
            if run < 0:
                self.fixed[old] = made[old]
            else:
                self.in_unit[run, unit, offset + number] = made[old]
        names = tuple(self._name(name, run, unit) for name in template.names)
        if isinstance(item, Node):
            args = _mapped(item.args, lambda _: next(reads))
            outputs = tuple(made.get(v, -1) for v in item.outputs)
            return msgspec.structs.replace(item, args=args, outputs=outputs, module=names[0])
        if isinstance(item, Input):
            return msgspec.structs.replace(renamed(item, names), value=made[item.value])
        return msgspec.structs.replace(renamed(item, names), value=next(reads, -1))

    def _value(self, use: Use, unit: int) -> int:
        if isinstance(use, Fixed):
            return _known(self.fixed, use.value)
        highest = self.stacks[self.runs[use.run].stack].units - 2
        if isinstance(use, AtEnd):
            return _known(self.in_unit, (use.run, 1 if use.unit == LOW else highest, use.offset))
        source = unit + use.shift
        if not 1 <= source <= highest:
            return _known(self.fixed, use.edge)
        return _known(self.in_unit, (use.run, source, use.offset))

    def _name(self, name: str | Place, run: int, unit: int) -> str:
        if isinstance(name, str):
            return name
        stack = self.stacks[name.stack]
        if run >= 0 and name.layer < 0:
            return name_at(Place(name.stack, unit + (name.unit or 0), -1 - name.layer, name.rest), self.stacks)
        if name.unit == UNITS - 1:
            return name_at(replace(name, unit=stack.units - 1), self.stacks)
        return name_at(name, self.stacks)


def _known(values: Mapping[K, int], key: K) -> int:
    if key not in values:
        raise NotRepeated("a layer reads what a later one makes")
    return values[key]
