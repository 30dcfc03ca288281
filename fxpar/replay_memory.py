"""Memory of one training step: the local program of one rank, replayed without tensors as the runtime runs it.

Storages are allocated and freed as the generated code does (``fxpar.runtime.execute``): an op's results are there from
the op on, a value is freed after its last reader, views and what they look at share storage, a collective holds the
buffers of ``collective_buffers``. Program inputs and outputs stay. Bytes are those of tensors: what an allocator rounds
up to, and what kernels take for themselves, is not counted (routed experts apart).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from fxpar.collective_buffers import Buffers, collective_buffers
from fxpar.cost.op_work import TensorShape, tensor_bytes, work_of, workspace_bytes
from fxpar.plans.program import Arg, Program, Ref, TensorType, map_refs
from fxpar.rules.factor_rule import argument_names
from fxpar.runtime.local import AddStep, AnyStep, CollectiveStep, LocalProgram, LocalStep, OpStep
from fxpar.strides import Strided, contiguous, copied, viewed


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        peak: the most that is live at once, inputs included.
        activations: the most of it that is neither a program input nor a gradient.
        at_peak: program values whose storage is live at the peak, neither program inputs nor gradients; one entry for
            each local tensor that holds one.
    """

    peak: int
    activations: int
    at_peak: tuple[int, ...]


def gradient_positions(program: Program) -> tuple[int, ...]:
    """Positions of the gradients among the program's outputs."""
    return tuple(i for i, o in enumerate(program.outputs) if o.kind == "gradient")


@dataclass(frozen=True)
class Stays:
    """Lifetimes that a local program does not show: inputs that go after their last reader (``temporary``), and values
    (``held``) that stay at least until step ``until``."""

    temporary: frozenset[int] = frozenset()
    held: tuple[int, ...] = ()
    until: int = -1


def replay_memory(local: LocalProgram, gradients: tuple[int, ...], stays: Stays | None = None) -> Memory:
    """What a rank holds in one step.

    Args:
        gradients: positions of the gradients among the outputs.
        stays: of which values lifetimes differ from what the program shows.
    """
    # where a pending sum is made of one tensor, ranks make zeros or keep it, with all that it is a view of: on every
    # axis either may hold more
    axes = sorted({step.axis for step in local.steps if isinstance(step, LocalStep) and step.kind == "to_partial"})
    kept = (frozenset(some) for count in range(len(axes) + 1) for some in combinations(axes, count))
    told = stays or Stays()
    return max((_Replay(local, gradients, some, told).run() for some in kept), key=lambda found: found.peak)


class _Replay:
    """Bytes of one rank, allocated and freed as the generated code does (``fxpar.runtime.execute``); used once.

    A collective is issued where it stands and finished right before its first result is read or waited for, or where
    its half of the program ends.
    """

    def __init__(
        self, local: LocalProgram, gradients: tuple[int, ...], keeping: frozenset[int], stays: Stays
    ) -> None:
        self.local, self.places, self.stays = local, Places(local, keeping), stays
        root = self.root = self.places.root
        self.sizes = [bytes_of(kind) for kind in local.types]
        self.gradients = [local.outputs[p] for p in gradients]
        self.fixed = {root[v] for v in (*local.inputs, *self.gradients)}
        lasting = (v for v in local.inputs if v not in stays.temporary)
        self.uses: Counter[int] = Counter(root[v] for v in (*lasting, *local.outputs, *stays.held))
        for step in local.steps:
            self.uses.update(root[v] for v in (*step.reads, *step.writes))
        self.pending: dict[int, tuple[CollectiveStep, Buffers]] = {}
        self.live = self.temporary = self.peak = self.activations = 0
        # the peak's place in the order of all that is allocated and freed, and from where to where storages were there
        self.tick = self.at_peak = 0
        self.made: dict[int, int] = {}
        self.gone: dict[int, int] = {}

    def run(self) -> Memory:
        for value in {self.root[v] for v in self.local.inputs}:
            self.take(value)
        self.note(0)
        phase = "forward"
        for index, step in enumerate(self.local.steps):
            if index == self.stays.until:
                self.finish_all()
                self.done(self.stays.held)
            if step.phase != phase:
                phase = step.phase
                self.finish_all()
            for value in step.reads:
                self.finish(value)
            if isinstance(step, CollectiveStep):
                self.start(step)
                self.done(step.reads)
                continue
            for value in step.writes:
                if self.root[value] == value:
                    self.take(value)
            self.note(_workspace(step, self.local))
            self.done((*step.reads, *step.writes))
        self.finish_all()
        if self.stays.until >= len(self.local.steps):
            self.done(self.stays.held)
        self.note(self.copied())
        origins, last = self.local.origins, self.tick + 1
        there = sorted(
            v for v, start in self.made.items()
            if start <= self.at_peak < self.gone.get(v, last) and v not in self.fixed and origins[v][0] >= 0
        )
        return Memory(self.peak, self.activations, tuple(origins[v][0] for v in there))

    def start(self, step: CollectiveStep) -> None:
        buffers = self.places.buffers[step.outputs[0]]
        self.note(buffers.starting)
        self.add(buffers.sent, buffers.sent)
        if any(buffers.shared):
            owner = step.outputs[buffers.shared.index(True)]
            self.sizes[owner] = buffers.received
            self.take(owner)
        else:
            self.add(buffers.received, buffers.received)
            self.made.update(dict.fromkeys(step.outputs, self.tick))  # under way
        if buffers.holds:
            self.uses.update(self.root[v] for v in step.reads)
        self.pending.update(dict.fromkeys(step.outputs, (step, buffers)))

    def finish(self, value: int) -> None:
        if value not in self.pending:
            return
        step, buffers = self.pending[value]
        for output in step.outputs:
            del self.pending[output]
        self.add(-buffers.sent, -buffers.sent)
        if buffers.holds:
            self.done(step.reads)
        for output, shared in zip(step.outputs, buffers.shared, strict=True):
            if not shared:
                self.take(output)
        self.note(buffers.finishing)
        if not any(buffers.shared):
            self.add(-buffers.received, -buffers.received)
        self.done(step.writes)

    def finish_all(self) -> None:
        while self.pending:
            self.finish(next(iter(self.pending)))

    def copied(self) -> int:
        """Bytes of gradients that are copied when they are handed over: those that do not lie in order, and those
        whose elements are another's as well (``own_memory`` of ``fxpar.runtime.step``)."""
        seen: set[int] = set()
        total = 0
        for value in self.gradients:
            size, root = bytes_of(self.local.types[value]), self.root[value]
            # parts of one bucket share its storage, each its own elements
            if not self.places.in_order(value) or (root in seen and self.sizes[root] == size):
                total += size
            seen.add(root)
        return total

    def take(self, value: int) -> None:
        size = self.sizes[value]
        self.add(size, 0 if value in self.fixed else size)
        self.made.setdefault(value, self.tick)

    def done(self, values: Iterable[int]) -> None:
        for value in values:
            root = self.root[value]
            self.uses[root] -= 1
            if not self.uses[root]:
                self.add(-self.sizes[root], 0 if root in self.fixed else -self.sizes[root])
                self.gone[root] = self.tick

    def add(self, size: int, temporary: int) -> None:
        self.tick += 1
        self.live += size
        self.temporary += temporary

    def note(self, working: int) -> None:
        """Look at what is live, with what an op takes for itself while it runs."""
        self.activations = max(self.activations, self.temporary + working)
        if self.live + working > self.peak:
            self.peak, self.at_peak = self.live + working, self.tick


def _workspace(step: AnyStep, local: LocalProgram) -> int:
    """Bytes that an op allocates for itself while it runs."""
    if not isinstance(step, OpStep) or not step.op.startswith("fxpar.experts"):
        return 0
    args = dict(zip(argument_names(step.op), step.args, strict=True))
    return workspace_bytes(step.op, [shape_of(local.types[v]) for v in step.operands], args)


class Places:
    """Where the values of a local program lie.

    Views are made of meta tensors, strides and all: a reshape of a transposed value is a copy, as it is when it runs.
    So is what other ops make of operands that do not lie in order: elementwise ops keep the order of their operands.
    What is made of operands in order is in order.

    ``keeping``: axes on which the rank keeps the tensors that pending sums are made of; other ranks make zeros.

    Attributes:
        root: per local value, the value whose storage it shares (itself when it owns it).
        buffers: of every collective, by its first result.
    """

    def __init__(self, local: LocalProgram, keeping: frozenset[int] = frozenset()) -> None:
        self.local = local
        self.root = list(range(len(local.types)))
        self.buffers: dict[int, Buffers] = {}
        self._strided: dict[int, Strided] = {}
        for step in local.steps:
            if isinstance(step, OpStep):
                self._op(step)
            elif isinstance(step, AddStep):
                self.root[step.output] = self.root[step.total]
            elif isinstance(step, LocalStep):
                if step.kind == "to_partial":
                    self._strided[step.output] = self.lies(step.value)
                    if step.axis in keeping:
                        self.root[step.output] = self.root[step.value]
                elif step.kind == "slice" and step.outer == 1 and self.in_order(step.value):
                    self.root[step.output] = self.root[step.value]  # a chunk of the outer dim is a view
            elif isinstance(step, CollectiveStep):
                buffers = collective_buffers(
                    step, local, [self.in_order(v) for v in step.values],
                    lambda value, shape: copied(self.lies(value), shape),
                )
                self.buffers[step.outputs[0]] = buffers
                joined = [v for v, shared in zip(step.outputs, buffers.shared, strict=True) if shared]
                for value in joined:
                    self.root[value] = joined[0]

    def lies(self, value: int) -> Strided:
        """Shape and strides of a value."""
        if value not in self._strided:
            kind = self.local.types[value]
            self._strided[value] = Strided(kind.shape, contiguous(kind.shape), kind.dtype)
        return self._strided[value]

    def in_order(self, value: int) -> bool:
        """Contiguous."""
        found = self._strided.get(value)
        return found is None or found.in_order

    def _op(self, step: OpStep) -> None:
        if not step.operands or not (_may_share(step, self.local) or self._keeps_order(step)):
            return
        numbers: dict[int, Arg] = {v: Ref(i) for i, v in enumerate(step.operands)}
        args = tuple(map_refs(arg, numbers) for arg in step.args)
        made = viewed(step.op, args, tuple(self.lies(v) for v in step.operands), len(step.outputs))
        for value, (result, shares) in zip(step.outputs, made, strict=True):
            if value >= 0:
                self._strided[value] = result
                if shares:
                    self.root[value] = self.root[step.operands[0]]

    def _keeps_order(self, step: OpStep) -> bool:
        """True when results may lie otherwise than in order, as an operand does."""
        return not _needs_arguments(step) and not all(map(self.in_order, step.operands))


def storage_roots(local: LocalProgram) -> list[int]:
    """Per local value, the value whose storage it shares (itself when it owns it)."""
    return Places(local).root


def shape_of(kind: TensorType) -> TensorShape:
    """A type as the cost model takes it."""
    return TensorShape(kind.shape, kind.dtype)


def bytes_of(kind: TensorType) -> int:
    """Bytes of a tensor."""
    return tensor_bytes(shape_of(kind))


def _may_share(step: OpStep, local: LocalProgram) -> bool:
    if _needs_arguments(step):
        return False
    inputs = [shape_of(local.types[v]) for v in step.operands]
    outputs = [None if v < 0 else shape_of(local.types[v]) for v in step.outputs]
    return work_of(step.op, inputs, outputs, {}).kind == "view"


def _needs_arguments(step: OpStep) -> bool:
    """Convolution, attention and experts: they need their arguments to be counted, and are no views."""
    return step.op.startswith(("aten.convolution", "fxpar.attention", "fxpar.experts"))
