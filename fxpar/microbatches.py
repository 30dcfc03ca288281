"""A program of the whole batch -> the program of one microbatch: the batch split along an axis in TIME.

Time is treated as one more mesh axis, under the same rules, of which no collective may be used. On it a value is

    Shard(batch)   made anew by every microbatch, of its part of the batch
    Replicate      the same in every microbatch: parameters and what follows from them; or of inputs alone, made ONCE a
                   step of the whole batch (a prologue: token counts, masks)
    Partial(sum)   a summand: it must reach the loss or a gradient by linear ops only, where microbatches are added up

Along the program (one pass in order) every value collects the placements in which it can be had, each with the choice
of its op that gives it; from loss and gradients backwards the versions that are needed are written out. An op none of
whose choices can be fed stops that: batch statistics, balance losses, centring over the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import msgspec

from fxpar.names import batch_class, classes_of
from fxpar.plans.errors import FxparError, UnsupportedError
from fxpar.plans.layout import PARTIAL_SUM, REPLICATE, Dims, Partial, Placement, Replicate, Shard
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.program import (
    Arg,
    Input,
    Microbatches,
    Node,
    Output,
    Program,
    Ref,
    TensorType,
    node_inputs,
)
from fxpar.rules.choices import Choice, JointChoice, Site, axis_choices, combine, sites_of
from fxpar.rules.factor_rule import argument_names, rebind
from fxpar.rules.localise import local_call
from fxpar.rules.ops.hub import HUB
from fxpar.rules.ops.microbatch import MICROBATCH
from fxpar.rules.registry import rule_for
from fxpar.time_parts import cut_dims, join_of, moving_geometry
from fxpar.wide_loss import with_wide_loss

WHOLE_BATCH_IN_EVERY_MICROBATCH, SUMMAND_OF_WHOLE, PART_OF_WHOLE, ONCE = 1000, 10, 10, 1
"""What versions of a value weigh where there are several: the least is taken."""
SHARE = "aten.div.Scalar"
"""What makes a value that is the same in every microbatch a summand of their sum."""

Key: TypeAlias = tuple[int, Placement]
Phase: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True)
class _Way:
    """How a value is had in a placement: ``choice`` of the op that makes it, None where it enters so or is made of the
    whole value: as a ``share`` (divided by the number of microbatches) or a ``part`` (cut out of it)."""

    weight: int
    choice: Choice | None
    of_whole: Literal["", "share", "part"] = ""


@dataclass
class _Known:
    """What is known of one value."""

    ways: dict[Placement, _Way] = field(default_factory=dict)
    of_batch: bool = False
    of_parameters: bool = False


def split_in_time(program: Program, count: int, *, batch_dim: int | None = None) -> Program:
    """The program that, run ``count`` times, computes exactly the loss and gradients of the whole batch.

    Args:
        program: of the whole batch, with logical dims.
        count: microbatches of equal size.
        batch_dim: the dim of the inputs that is the batch, when the user says so.

    Raises:
        FxparError: the batch does not divide, or a value mixes samples in a way that is not a sum; names the user's
            line and module.
    """
    if count == 1:
        return program
    return _Splitter(with_wide_loss(program), count, batch_dim).run()


def batch_cuts(program: Program, count: int, batch_dim: int | None = None) -> dict[str, int]:
    """Inputs that microbatches have parts of -> the dim along which.

    Raises:
        FxparError: the batch does not divide.
    """
    splitter = _Splitter(program, count, batch_dim)
    splitter.check_batch()
    found = {i.name: splitter.batch_shard(i.value) for i in program.inputs if i.kind == "input"}
    return {name: shard.dim for name, shard in found.items() if shard is not None}


def batch_size(program: Program, batch_dim: int | None = None) -> int:
    """Samples of the batch: what microbatches and data parallel ranks can divide; 1 where no input is seen to hold a
    batch."""
    splitter = _Splitter(program, 1, batch_dim)
    sizes = {program.dims[i.value][s.dim][0] for i in program.inputs
             if i.kind == "input" and (s := splitter.batch_shard(i.value)) is not None}
    return math.gcd(*sizes) if sizes else 1


class _Splitter:
    """Used once."""

    def __init__(self, program: Program, count: int, batch_dim: int | None) -> None:
        self.program, self.count = program, count
        self.mesh = Mesh((Axis("time", count),))
        self.sites = sites_of(program)
        classes = classes_of(program)
        self.batch = batch_class(program, batch_dim, classes)
        self.of_atom = classes.of_atom
        self.batch_atoms = next((
            program.dims[i.value][dim] for i in program.inputs if i.kind == "input"
            for dim, row in enumerate(self.of_atom[i.value]) if row and row[0] in self.batch), ())
        self.known = [_Known() for _ in program.types]
        self.calls: dict[tuple[Site, str], tuple[str, tuple[Arg, ...]] | None] = {}
        self.seeds = {i.value for i in program.inputs if i.kind == "seed"}
        for node in program.nodes:
            if node.op == HUB and not self.seeds.isdisjoint(node_inputs(node)):
                self.seeds.update(node.outputs)
        self.producer = {v: n for n, node in enumerate(program.nodes) for v in node.outputs if v >= 0}

    def run(self) -> Program:
        self.check_batch()
        for item in self.program.inputs:
            self.enter(item)
        for index in range(len(self.program.nodes)):
            self.look(index)
        wanted = [self.placement_of_output(output) for output in self.program.outputs]
        return _Writer(self, wanted).run()

    # what there is

    def check_batch(self) -> None:
        found = [
            (self.program.dims[i.value][s.dim], self.program.types[i.value].shape[s.dim])
            for i in self.program.inputs if i.kind == "input" and (s := self.batch_shard(i.value)) is not None
        ]
        sizes = sorted({atoms[0] for atoms, _ in found})
        if not sizes:
            raise FxparError(
                f"the batch cannot be cut into {self.count} microbatches: no input is seen to hold a batch",
                where="--microbatches",
                way_out="leave --microbatches out, or say in model.py which dim it is (batch_dim)",
            )
        uneven = [n for n in sizes if n % self.count]
        if uneven:
            atoms, whole = next(row for row in found if row[0][0] == uneven[0])
            if len(atoms) > 1:
                raise FxparError(
                    f"a batch of {whole} that the model reads as {' x '.join(map(str, atoms))} does not divide into "
                    f"{self.count} microbatches", where="--microbatches",
                    way_out=f"a number that divides {math.gcd(*sizes)}",
                )
            raise FxparError(
                f"a batch of {uneven[0]} does not divide into {self.count} microbatches", where="--microbatches",
                numbers=f"{uneven[0]} = {uneven[0] // self.count} x {self.count} + {uneven[0] % self.count}",
                way_out=f"a number that divides {math.gcd(*sizes)}",
            )

    def batch_shard(self, value: int) -> Shard | None:
        """The batch of an input: the outer logical dim of one of its dims; of one that is not seen to carry the batch
        its first dim, where that is as long (what may be cut so is for the rules to say)."""
        for dim, row in enumerate(self.of_atom[value]):
            if row and row[0] in self.batch:
                return Shard(dim)
        atoms = self.program.dims[value]
        return Shard(0) if atoms and atoms[0] and atoms[0] == self.batch_atoms else None

    def carries_batch(self, value: int) -> bool:
        return any(c in self.batch for row in self.of_atom[value] for c in row)

    def enter(self, item: Input) -> None:
        known = self.known[item.value]
        known.ways[REPLICATE] = _Way(0, None)
        known.of_parameters = item.kind in ("parameter", "tangent")
        shard = self.batch_shard(item.value) if item.kind in ("input", "constant") else None
        if shard is not None and self.even(self.program.dims[item.value], shard):
            known.ways[shard] = _Way(0, None)
            known.of_batch = item.kind == "input"

    def even(self, dims: Dims | None, placement: Placement) -> bool:
        """Whether microbatches are equal parts of one logical dim."""
        if dims is None or not isinstance(placement, Shard):
            return True
        return placement.length == 1 and dims[placement.dim][placement.first] % self.count == 0

    def look(self, index: int) -> None:
        """Enter every way in which the results of a node are had."""
        node, site = self.program.nodes[index], self.sites[index]
        operands = node_inputs(node)
        of_batch = any(self.known[v].of_batch for v in operands)
        of_parameters = any(self.known[v].of_parameters for v in operands)
        for value in (v for v in node.outputs if v >= 0):
            self.known[value].of_batch, self.known[value].of_parameters = of_batch, of_parameters
        mixed = of_batch and of_parameters
        for choice in axis_choices(site):
            own = 0
            if choice.name == "." and of_batch:
                if mixed and any(self.carries_batch(v) for v in (*operands, *node.outputs) if v >= 0):
                    continue  # not to be split is not to be run at once
                own = WHOLE_BATCH_IN_EVERY_MICROBATCH if mixed and not self.scalars(node) else ONCE
            weight = self.weight_of(operands, choice)
            if weight is None or not self.possible(site, choice):
                continue
            for value, placement in zip(node.outputs, choice.outputs, strict=True):
                if placement == REPLICATE and of_batch and not mixed and choice.name != ".":
                    continue  # what runs once reads nothing of a microbatch
                if value >= 0:
                    self.offer(value, placement, _Way(weight + own, choice))
        for value in (v for v in node.outputs if v >= 0):
            self.offer_share(value)

    def scalars(self, node: Node) -> bool:
        values = (*node_inputs(node), *(v for v in node.outputs if v >= 0))
        return all(math.prod(self.program.types[v].shape) == 1 for v in values)

    def offer(self, value: int, placement: Placement, way: _Way) -> None:
        ways = self.known[value].ways
        if placement not in ways or way.weight < ways[placement].weight:
            ways[placement] = way

    def offer_part(self, value: int, shard: Shard) -> None:
        known, dims = self.known[value], self.program.dims[value]
        if known.of_parameters or REPLICATE not in known.ways or shard.first or not self.even(dims, shard):
            return
        # a weight is not cut in time, nor what merely is as long as the batch
        if dims[shard.dim] == self.batch_atoms and (known.of_batch or self.of_atom[value][shard.dim][0] in self.batch):
            self.offer(value, shard, _Way(known.ways[REPLICATE].weight + PART_OF_WHOLE, None, "part"))

    def offer_share(self, value: int) -> None:
        ways, dtype = self.known[value].ways, self.program.types[value].dtype
        if REPLICATE in ways and dtype.startswith(("float", "bfloat", "complex")):
            self.offer(value, PARTIAL_SUM, _Way(ways[REPLICATE].weight + SUMMAND_OF_WHOLE, None, "share"))

    def weight_of(self, operands: tuple[int, ...], choice: Choice) -> int | None:
        """Of the heaviest operand as the choice wants it, None when one is not to be had so."""
        worst = 0
        for value, placement in zip(operands, choice.inputs, strict=True):
            way = self.known[value].ways.get(placement)
            if way is None:
                if placement == PARTIAL_SUM:
                    self.offer_share(value)
                elif isinstance(placement, Shard):
                    self.offer_part(value, placement)
                way = self.known[value].ways.get(placement)
            if way is None:
                return None
            worst = max(worst, way.weight)
        return worst

    def possible(self, site: Site, choice: Choice) -> bool:
        """Whether a microbatch runs the choice by an op of its own that is the same for all."""
        if choice.expands or any(isinstance(p, Partial) and p.reduce != "sum" for p in choice.outputs):
            return False
        rows = zip((*site.inputs, *site.outputs), (*choice.inputs, *choice.outputs), strict=True)
        return all(self.even(dims, p) for dims, p in rows) and self.call(site, choice) is not None

    def call(self, site: Site, choice: Choice) -> tuple[str, tuple[Arg, ...]] | None:
        """The op and args of every microbatch, None when they differ or the choice is none here."""
        key = (site, choice.name)
        if key not in self.calls:
            joint = combine(site, (choice,), self.mesh)
            self.calls[key] = None if joint is None else self.local(site, joint)
        return self.calls[key]

    def local(self, site: Site, joint: JointChoice) -> tuple[str, tuple[Arg, ...]] | None:
        first, last = (local_call(site, joint, self.mesh, (i,)) for i in (0, self.count - 1))
        if first == last:
            return first
        declared = rule_for(site.call.op)
        if declared is None or not declared.random:
            return None
        op, args = first
        place = argument_names(op).index("geometry")
        moving = moving_geometry(args[place])
        return None if moving is None else (op, (*args[:place], moving, *args[place + 1 :]))

    # what is wanted

    def placement_of_output(self, output: Output) -> Placement:
        known = self.known[output.value]
        allowed = {p: way for p, way in known.ways.items() if isinstance(p, Partial | Replicate) or (
            output.kind == "output" and isinstance(p, Shard) and p.first == 0)}
        if not allowed:
            raise self.refusal(output)
        return min(allowed, key=lambda p: (allowed[p].weight, isinstance(p, Partial), str(p)))

    def refusal(self, output: Output) -> FxparError:
        """What stops the output: the first op on the way to it that no choice of placements can feed."""
        above: set[int] = set()
        todo = [output.value]
        while todo:
            value = todo.pop()
            index = self.producer.get(value)
            if index is not None and index not in above:
                above.add(index)
                todo += node_inputs(self.program.nodes[index])
        stuck = [
            n for n in sorted(above)
            if not all(self.known[v].ways for v in self.program.nodes[n].outputs if v >= 0)
        ]
        name = {"loss": "the loss", "gradient": f"the gradient of {output.name}"}.get(
            output.kind, f"{output.kind} {output.name}")
        way_out = (
            "leave --microbatches out; or say --microbatch-semantics accumulate: each microbatch is then a batch of "
            "its own, and loss and gradients are averaged"
        )
        if not stuck:
            return UnsupportedError(
                f"{name} cannot be put together from {self.count} microbatches",
                numbers="it is left split along a dim that is not its own outer one", way_out=way_out)
        node = self.program.nodes[stuck[0]]
        return UnsupportedError(
            f"{self.count} microbatches would change the result: {node.op} needs the whole batch at once",
            where=", ".join(filter(None, (node.source, f"in module {node.module}" if node.module else ""))),
            numbers=[*(self.words(v) for v in dict.fromkeys(node_inputs(node))),
                     f"on the way to {name} it is no sum over samples"],
            way_out=way_out,
        )

    def words(self, value: int) -> str:
        """How an operand is left over time."""
        kind = self.program.types[value]
        shape = f"{kind.dtype}{list(kind.shape)}"
        ways = self.known[value].ways
        if any(isinstance(p, Shard) for p in ways):
            return f"an operand {shape} is split over microbatches"
        if ways.get(PARTIAL_SUM) is not None and REPLICATE not in ways:
            return f"an operand {shape} is a sum over microbatches, which is known after the last only"
        return f"an operand {shape} is the same in every microbatch"


class _Writer:
    """Writes the versions that are wanted as a program; used once."""

    def __init__(self, splitter: _Splitter, wanted: list[Placement]) -> None:
        self.split, self.program, self.count = splitter, splitter.program, splitter.count
        self.wanted = wanted
        self.needed: dict[Key, None] = {}
        self.number: dict[Key, int] = {}
        self.types: list[TensorType] = []
        self.dims: list[Dims] = []
        self.microbatch = -1

    def way(self, key: Key) -> _Way:
        return self.split.known[key[0]].ways[key[1]]

    def sources(self, key: Key) -> Iterator[Key]:
        """What a version is made of."""
        way = self.way(key)
        if way.of_whole:
            yield key[0], REPLICATE
        elif way.choice is not None:
            node = self.program.nodes[self.split.producer[key[0]]]
            yield from zip(node_inputs(node), way.choice.inputs, strict=True)

    def run(self) -> Program:
        program = self.program
        todo: list[Key] = [(o.value, p) for o, p in zip(program.outputs, self.wanted, strict=True)]
        todo += [(i.value, REPLICATE) for i in program.inputs if i.kind in ("parameter", "buffer", "tangent")]
        while todo:
            key = todo.pop()
            if key not in self.needed:
                self.needed[key] = None
                todo += self.sources(key)
        for item in program.inputs:  # one that nobody reads is an argument all the same
            ways = self.split.known[item.value].ways
            if not any((item.value, p) in self.needed for p in ways):
                self.needed[item.value, next((p for p in ways if isinstance(p, Shard)), REPLICATE)] = None
        inputs, cuts = self.enter()
        nodes, once = self.write()
        outputs, joins = [], []
        for output, placement in zip(program.outputs, self.wanted, strict=True):
            outputs.append(msgspec.structs.replace(output, value=self.number[output.value, placement]))
            joins.append(join_of(placement))
        time = Microbatches(self.count, "exact", once, cuts, tuple(joins))
        return msgspec.structs.replace(
            program, types=tuple(self.types), dims=tuple(self.dims), inputs=inputs, nodes=nodes, outputs=tuple(outputs),
            time=time,
        )

    def define(self, key: Key) -> int:
        value, placement = key
        dims = cut_dims(self.program.dims[value], placement, self.count)
        shape = list(self.program.types[value].shape)
        if isinstance(placement, Shard):
            shape[placement.dim] //= self.count
        if value in self.split.seeds:  # the seed, and which microbatch it is
            shape, dims = [2], ((2,),)
        self.types.append(TensorType(tuple(shape), self.program.types[value].dtype))
        self.dims.append(dims)
        self.number[key] = len(self.types) - 1
        return self.number[key]

    def enter(self) -> tuple[tuple[Input, ...], tuple[int, ...]]:
        """The inputs: one that is read both whole and in parts is there twice."""
        inputs, cuts = [], []
        for item in self.program.inputs:
            for placement in self.split.known[item.value].ways:
                key = (item.value, placement)
                if key in self.needed and not self.way(key).of_whole:
                    inputs.append(msgspec.structs.replace(item, value=self.define(key)))
                    cuts.append(placement.dim if isinstance(placement, Shard) else -1)
        if any(self.way(key).of_whole == "part" for key in self.needed):
            self.types.append(TensorType((), "int64"))
            self.dims.append(())
            self.microbatch = len(self.types) - 1
            inputs.append(Input(self.microbatch, "microbatch", "microbatch"))
            cuts.append(-1)
        return tuple(inputs), tuple(cuts)

    def write(self) -> tuple[tuple[Node, ...], tuple[int, ...]]:
        """The nodes: those that run once first, then those of every microbatch, each in the old order."""
        versions: dict[tuple[int, str], list[Key]] = {}
        of_whole: dict[int, list[Key]] = {}
        for key in self.needed:
            way = self.way(key)
            if way.of_whole:
                of_whole.setdefault(key[0], []).append(key)
            elif way.choice is not None:
                versions.setdefault((self.split.producer[key[0]], way.choice.name), []).append(key)
        once = self.once(versions)
        order = sorted(versions, key=lambda v: (v not in once, v[0], v[1]))
        nodes: list[Node] = []
        run_once: list[int] = []
        for item in self.program.inputs:
            self.of_whole(item.value, of_whole, nodes, "forward")
        for index, name in order:
            node = self.program.nodes[index]
            phase = "forward" if (index, name) in once else node.phase
            choice = next(c for c in axis_choices(self.split.sites[index]) if c.name == name)
            found = self.split.call(self.split.sites[index], choice)
            assert found is not None  # offered
            op, args = found
            reads = [self.number[key] for key in zip(node_inputs(node), choice.inputs, strict=True)]
            made = tuple(
                -1 if v < 0 else self.define((v, p)) if (v, p) not in self.number else -1
                for v, p in zip(node.outputs, choice.outputs, strict=True)
            )
            if all(v < 0 for v in made):
                continue  # another version made it all
            if (index, name) in once:
                run_once.append(len(nodes))
            nodes.append(msgspec.structs.replace(node, op=op, args=rebind(args, reads), outputs=made, phase=phase))
            for value in node.outputs:
                if value >= 0 and (value, REPLICATE) in self.number:
                    self.of_whole(value, of_whole, nodes, node.phase)
        return tuple(nodes), tuple(run_once)

    def of_whole(self, value: int, wanted: dict[int, list[Key]], nodes: list[Node], phase: Phase) -> None:
        """What one microbatch has of what is the same in all: a summand, or its part of the batch."""
        index = self.split.producer.get(value)
        place = self.program.nodes[index] if index is not None else None
        for key in wanted.pop(value, ()):
            whole, placement = Ref(self.number[value, REPLICATE]), key[1]
            op, args = SHARE, cast(tuple[Arg, ...], (whole, self.count))
            if isinstance(placement, Shard):
                op, args = MICROBATCH, (whole, Ref(self.microbatch), placement.dim, self.count)
            nodes.append(Node(op, args, (self.define(key),), phase, place.module if place else "",
                              place.source if place else ""))

    def once(self, versions: dict[tuple[int, str], list[Key]]) -> set[tuple[int, str]]:
        """Versions that run once: whole ones of batch inputs alone, what parts are cut from, and all that they are made
        of."""
        known = self.split.known
        todo = [
            (index, name) for index, name in versions if name == "." and any(
                known[v].of_batch and not known[v].of_parameters for v in self.program.nodes[index].outputs if v >= 0)
        ]
        for value, placement in self.needed:  # parts are cut out of what is made once
            whole = known[value].ways.get(REPLICATE)
            if known[value].ways[placement].of_whole == "part" and not known[value].of_parameters and whole is not None:
                if whole.choice is not None:
                    todo.append((self.split.producer[value], whole.choice.name))
        found: set[tuple[int, str]] = set()
        while todo:
            version = todo.pop()
            if version in found:
                continue
            found.add(version)
            for value in node_inputs(self.program.nodes[version[0]]):
                way = known[value].ways[REPLICATE]
                if way.choice is not None:
                    todo.append((self.split.producer[value], way.choice.name))
        return found
