"""Which atoms of a program are the same loop, which of these is the batch, and what people call them.

Atoms that one factor of an op carries in several operands are one *class*; so are those of a parameter and its
gradient, of a buffer and its new value. A class is what a user means by batch, sequence, heads, vocabulary. Choices and
reshards never depend on a class being right: they read positions only (:mod:`fxpar.rules.choices`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from fxpar.logical_dims import twins
from fxpar.plans.layout import Dims
from fxpar.plans.program import Program, node_inputs
from fxpar.rules.choices import Factor, Site, factors_on_atoms, site_of
from fxpar.rules.registry import rule_cache
from fxpar.union_find import UnionFind


@dataclass(frozen=True)
class Classes:
    """Classes, numbered in order of their first atom.

    ``of_atom[value][dim][atom]`` and ``of_factor[node][factor]`` (factors as in ``factors_on_atoms(site_of(node))``:
    factor ``i`` is the choice ``"f<i>"``) are class numbers; ``sizes[c]`` is the size of every atom of class c.
    ``kin[c]`` is the least class that c probably continues or is continued by, through ops that keep the shape but not
    the loop (the hidden dim on both sides of a norm, any op without a rule): good for names, not for layouts.
    """

    of_atom: tuple[tuple[tuple[int, ...], ...], ...]
    of_factor: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    kin: tuple[int, ...]

    def of_value(self, value: int) -> tuple[int, ...]:
        """Classes of a value's atoms, dim by dim."""
        return tuple(c for row in self.of_atom[value] for c in row)


@lru_cache(maxsize=100_000)
def _starts(dims: Dims) -> tuple[int, ...]:
    """Number of atoms before each dim, and in all."""
    starts = [0]
    for atoms in dims:
        starts.append(starts[-1] + len(atoms))
    return tuple(starts)


Place = tuple[int, int, int]
"""(operand, dim, atom), outputs numbered on after the operands."""


def places_of(factor: Factor) -> tuple[Place, ...]:
    """The atoms that a factor cuts."""
    return tuple((o, *at) for o, at in enumerate((*factor.inputs, *factor.outputs)) if at is not None)


def _alike(site: Site, factor: Factor) -> tuple[Place, ...]:
    """The atoms that are one loop; of a loose group those whose dims are cut alike."""
    places = places_of(factor)
    if not factor.group.loose:
        return places
    row = (*site.inputs, *site.outputs)
    kept = {(o, dim): dims[dim] for o, dim, _ in places if (dims := row[o]) is not None}
    first = kept[places[0][:2]]
    return tuple((o, dim, atom) for o, dim, atom in places if kept[o, dim] == first)


@rule_cache(100_000)
def loops(site: Site) -> tuple[tuple[tuple[Place, ...], ...], tuple[tuple[Place, Place], ...]]:
    """Places of every factor of a site; and pairs of atoms that the op keeps whole, at one place of an operand and of
    an output with the same dims."""
    factors = tuple(_alike(site, factor) for factor in factors_on_atoms(site))
    cut = {(o, dim) for places in factors for o, dim, _ in places}
    pairs = []
    for output, dims in enumerate(site.outputs, len(site.inputs)):
        for operand, other in enumerate(site.inputs):
            for dim, atoms in enumerate(other if other == dims else ()):
                if (output, dim) not in cut and (operand, dim) not in cut:
                    pairs += [((operand, dim, i), (output, dim, i)) for i in range(len(atoms))]
    return factors, tuple(pairs)


_latest: list[tuple[Program, Classes]] = []  # of the last program asked for: hashing one takes as long as this


def classes_of(program: Program) -> Classes:
    """The classes of a program whose logical dims are analysed."""
    if not (_latest and _latest[0][0] is program):
        _latest[:] = [(program, _classes_of(program))]
    return _latest[0][1]


def _classes_of(program: Program) -> Classes:
    base, sizes = [0], []
    for dims in program.dims:
        base.append(base[-1] + _starts(dims)[-1])
        sizes += [atom for atoms in dims for atom in atoms]
    union, kin = UnionFind(len(sizes)), UnionFind(len(sizes))
    for a, b in twins(program):
        if program.dims[a] == program.dims[b]:
            for offset in range(base[a + 1] - base[a]):
                union.join(base[a] + offset, base[b] + offset)
                kin.join(base[a] + offset, base[b] + offset)
    firsts: list[list[int]] = []
    for node in program.nodes:
        values = (*node_inputs(node), *node.outputs)

        def number_of(place: Place, values: tuple[int, ...] = values) -> int:
            value = values[place[0]]
            return base[value] + _starts(program.dims[value])[place[1]] + place[2]

        factors, pairs = loops(site_of(node, program))
        row = []
        for places in factors:
            first = number_of(places[0])
            for place in places[1:]:
                other = number_of(place)
                union.join(first, other)
                kin.join(first, other)
            row.append(first)
        firsts.append(row)
        for a_place, b_place in pairs:
            kin.join(number_of(a_place), number_of(b_place))
    number: dict[int, int] = {}
    class_of = [number.setdefault(union.find(atom), len(number)) for atom in range(len(sizes))]
    of_size = [0] * len(number)
    for size, c in zip(sizes, class_of, strict=True):
        of_size[c] = size
    first_atom: dict[int, int] = {}
    for atom, c in enumerate(class_of):
        first_atom.setdefault(c, atom)
    return Classes(
        tuple(
            tuple(
                tuple(class_of[base[value] + low : base[value] + high])
                for low, high in zip(_starts(dims), _starts(dims)[1:], strict=False)
            )
            for value, dims in enumerate(program.dims)
        ),
        tuple(tuple(class_of[atom] for atom in row) for row in firsts),
        tuple(of_size),
        tuple(class_of[kin.find(first_atom[c])] for c in range(len(number))),
    )


def reach(program: Program, classes: Classes) -> dict[int, tuple[int, int]]:
    """Per kin, (nodes that may be split along it, nodes that read it and may not), of the forward nodes that depend on
    an input.

    A node may be split along it when one of its factors cuts every such atom of its operands, and what is summed over
    is summed to a single number (a loss or a count): any other sum puts an end to the loop.
    """
    found: dict[int, list[int]] = {}
    depends = {i.value for i in program.inputs if i.kind == "input"}
    for node, numbers in zip(program.nodes, classes.of_factor, strict=True):
        operands = node_inputs(node)
        if node.phase != "forward" or depends.isdisjoint(operands):
            continue
        depends.update(node.outputs)
        places: dict[int, set[Place]] = {}
        for operand, value in enumerate(operands):
            for dim, row in enumerate(classes.of_atom[value]):
                for atom, c in enumerate(row):
                    places.setdefault(classes.kin[c], set()).add((operand, dim, atom))
        split = set()
        for factor, c in zip(factors_on_atoms(site_of(node, program)), numbers, strict=True):
            summed = any(
                reduce is not None and value >= 0 and any(program.dims[value])
                for reduce, value in zip(factor.group.contract, node.outputs, strict=True)
            )
            # what a split loop needs beyond local calls counts as an obstacle, as it does for a batch
            if not factor.group.expands and not summed and places.get(classes.kin[c], set()) <= set(places_of(factor)):
                split.add(classes.kin[c])
        for k in places:
            found.setdefault(k, [0, 0])[0 if k in split else 1] += 1
    return {k: (free, obstructed) for k, (free, obstructed) in found.items()}


def batch_class(program: Program, batch_dim: int | None = None, classes: Classes | None = None) -> frozenset[int]:
    """The classes that are the batch: empty when there is none (a batch of size 1, or a ``batch_dim`` no input has).

    Args:
        batch_dim: the dim of the input tensors that holds the batch, when the user says so. An input whose dim
            ``batch_dim`` is seen to be something else (a mask ``[s, s]`` beside ``x [b, s, d]``) does not count.
            Without it the batch is what of an input most of the forward may be split along and least is obstructed,
            then what more inputs carry, then the outer dim of the earlier input; never what a parameter carries too.
        classes: those of the program, when they are at hand.

    Inputs that do not carry the batch so found (the texts beside the images of a two-tower model) add their own where
    it has the same size and no input carries both.
    """
    classes = classes or classes_of(program)
    kin = classes.kin
    inputs = [i.value for i in program.inputs if i.kind == "input"]
    rows = [[{kin[c] for c in row} for row in classes.of_atom[value]] for value in inputs]
    carried: dict[int, list[tuple[int, int]]] = {}  # kin -> (order of the input, dim)
    for order, input_rows in enumerate(rows):
        for dim, row in enumerate(input_rows):
            for k in sorted(row) if batch_dim in (None, dim) else ():
                carried.setdefault(k, []).append((order, dim))
    if batch_dim is None:
        parameters = {c for i in program.inputs if i.kind == "parameter" for c in classes.of_value(i.value)}
        for value in inputs:
            for c in parameters.intersection(classes.of_value(value)):
                carried.pop(kin[c], None)
    if not carried:
        return frozenset()
    score = reach(program, classes)

    def rank(k: int) -> tuple[int, int, tuple[int, int], int]:
        free, obstructed = score.get(k, (0, 0))
        return obstructed - free, -len({order for order, _ in carried[k]}), carried[k][0], k

    best = min(carried, key=rank)
    chosen = {best}
    if batch_dim is not None:  # the whole of that dim
        chosen.update(*(row[batch_dim] for row in rows if batch_dim < len(row) and best in row[batch_dim]))
    all_of = [set().union(*input_rows) for input_rows in rows]
    beside = set().union(*(found for found in all_of if not chosen.isdisjoint(found)))
    for order, found in enumerate(all_of):
        if chosen.isdisjoint(found):
            more = [
                k
                for k in carried
                if any(o == order for o, _ in carried[k])
                and classes.sizes[k] == classes.sizes[best]
                and k not in beside
                and (batch_dim is not None or rank(k)[0] < 0)
            ]
            if more:
                chosen.add(min(more, key=rank))
                beside |= found
    return frozenset(c for c, k in enumerate(kin) if k in chosen)


def names_of(program: Program, classes: Classes, batch: Iterable[int] = ()) -> tuple[str, ...]:
    """What people call each class, from where it occurs: batch, sequence, vocab, hidden, heads, head_dim, ffn,
    channels, height, width, classes; ``d<size>`` for the rest. Several classes may have one name (heads of every
    layer)."""
    batch = frozenset(batch)
    kin = classes.kin
    names: dict[int, str] = dict.fromkeys(sorted(kin[c] for c in batch), "batch")

    def give(name: str, found: Iterable[int]) -> None:
        for c in found:
            names.setdefault(kin[c], name)

    rows: dict[str, list[tuple[tuple[tuple[int, ...], ...], ...]]] = {}  # per op, atoms of its operands
    for node in program.nodes:
        if node.phase == "forward":
            operands = tuple(classes.of_atom[v] for v in node_inputs(node))
            rows.setdefault(node.op, []).append(operands)
    for weight, index, *_ in rows.get("aten.embedding.default", []):
        looked_up = any(not batch.isdisjoint(row) for row in index)
        give("vocab" if looked_up or not batch else "positions", weight[0])
        give("hidden", weight[1] if looked_up or not batch else ())
    for query, key, value, *_ in rows.get("fxpar.attention.default", []):
        give("heads", (*query[1], *key[1]))
        give("sequence", (*query[2], *key[2]))
        give("head_dim", (*query[3], *key[3], *value[3]))
    for x, _, _, up, down, *_ in rows.get("fxpar.experts.default", []):
        give("experts", up[0])
        give("ffn", down[2])
        give("hidden", (*x[1], *up[2], *down[1]))
    for op in ("aten._softmax.default", "aten._safe_softmax.default"):
        for scores, *_ in rows.get(op, []):
            if len(scores) > 3 or (len(scores) == 3 and len(scores[0]) > 1):  # [b, h, q, k] or [(b h), q, k]
                give("sequence", (*scores[-2], *scores[-1]))
                give("heads", scores[-3])
    for _, *scale in rows.get("aten.native_layer_norm.default", []):
        give("hidden", (c for operand in scale for row in operand for c in row))
    hidden = {classes.sizes[c] for c, name in names.items() if name == "hidden"}
    for x, weight, *_ in rows.get("aten.convolution.default", []):
        for c in (*x[1], *weight[0], *weight[1]):
            give("hidden" if classes.sizes[c] in hidden else "channels", (c,))
        for name, row in zip(("height", "width") if len(x) == 4 else ("sequence",), x[2:], strict=False):
            give(name, row)
    vocab = {classes.sizes[c] for c, name in names.items() if name == "vocab"}
    for node in program.nodes:
        if node.op == "fxpar.sum_exp.default" and node.phase == "forward":
            scores = classes.of_atom[node_inputs(node)[0]]
            dim = node.args[2]
            kind = scores[dim] if scores and isinstance(dim, int) else ()
            give("vocab" if vocab & {classes.sizes[c] for c in kind} else "classes", kind)
    for entry in program.inputs:
        if entry.kind == "input" and not program.types[entry.value].dtype.startswith(("float", "bfloat", "complex")):
            if not batch.isdisjoint(classes.of_value(entry.value)):
                give("sequence", classes.of_value(entry.value))
    hidden = {classes.sizes[c] for c, name in names.items() if name == "hidden"}
    matrices = [classes.of_atom[i.value] for i in program.inputs if i.kind == "parameter"]
    matrices = [m for m in matrices if len(m) == 2]
    for row in (row for matrix in matrices for row in matrix):
        if len(row) == 1 and classes.sizes[row[0]] in hidden:
            give("hidden", row)
    for a, b in matrices:
        for wide, other in ((a, b), (b, a)):
            if len(wide) == 1 and any(names.get(kin[c]) == "hidden" for c in other):
                give("ffn", wide)
    return tuple(names.get(k, f"d{size}") for k, size in zip(kin, classes.sizes, strict=True))
