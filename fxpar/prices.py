"""What a choice costs on a cluster: ns of a local op, ns of a reshard, bytes of a stored shard.

Prices are of the rank at coordinate 0 of every axis, which holds the largest shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from fxpar.cost.cluster import Cluster
from fxpar.cost.collectives import CollectiveKind, collective_ns
from fxpar.cost.compute import Work, compute_ns
from fxpar.cost.op_work import TensorShape, is_view_op, tensor_bytes, work_of
from fxpar.plans.layout import Dims, Layout, largest_shape, largest_size
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import TensorType
from fxpar.plans.reshard import COLLECTIVES, Step, StepKind, reshard_steps
from fxpar.reshard_tables import IntArray, KnownPairs, PriceKind
from fxpar.rules.choices import JointChoice, Site
from fxpar.rules.expansion import Exchange, Expansion
from fxpar.rules.factor_rule import argument_names
from fxpar.rules.localise import expansion_of, local_call
from fxpar.runtime.rewrite.bucket import BUCKET_BYTES

PAIRS_ONE_BY_ONE = 64
"""A table of fewer pairs is priced pair by pair."""

MovingKind = CollectiveKind | Literal["halo", "halo_sum"]


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices on one mesh of one cluster."""

    cluster: Cluster
    mesh: Mesh

    def op_ns(self, site: Site, choice: JointChoice) -> int:
        """Time of the local op, or of all steps of a choice that expands. Hubs and views are free."""
        if site.call.op == "fxpar.hub.default":
            return 0
        if choice.expands:
            return _expansion_ns(self, expansion_of(site, choice, self.mesh, (0,) * len(self.mesh.axes)))
        return compute_ns(self.cluster.device, local_work(site, choice, self.mesh))

    def reshard_ns(self, source: Layout, target: Layout, dims: Dims, kind: TensorType) -> int:
        """Time of all steps from one layout to another."""
        return _reshard_ns(self, source, target, dims, kind.dtype)

    def gradient_ns(self, source: Layout, target: Layout, dims: Dims, kind: TensorType) -> int:
        """Time of a gradient's reshard to its parameter's layout: reductions travel in buckets, so a small one pays
        its share of a bucket instead of a latency of its own, unless something else than a reduction follows it."""
        return _gradient_ns(self, source, target, dims, kind.dtype)

    def input_ns(self, source: Layout, target: Layout, dims: Dims, kind: TensorType) -> int:
        """Time of a program input's reshard: its gathering, if that comes first, travels in a bucket with others."""
        return _input_ns(self, source, target, dims, kind.dtype)

    def step_ns(self, step: Step, dims: Dims, dtype: str) -> int:
        """Time of one reshard step."""
        return self.move_ns(step.kind, step.axis, step_elements_held(step, dims, self.mesh), dtype)

    def move_ns(self, kind: StepKind, axis: int, elements: int, dtype: str, shared: bool = False) -> int:
        """Time of a reshard step on ``elements`` (:func:`step_elements_held`); of a small collective that travels in a
        ``shared`` bucket its share of a full one's."""
        if kind == "alias":
            return 0
        size = tensor_bytes(TensorShape((elements,), dtype))
        if kind not in COLLECTIVES:
            # slices and zeroings are copies of what stays
            return compute_ns(self.cluster.device, Work("memory", 0, 2 * size, dtype))
        if shared and size < BUCKET_BYTES:
            whole = self.collective_ns(kind, axis, BUCKET_BYTES)  # type: ignore[arg-type]
            return -(-whole * size // BUCKET_BYTES)
        return self.collective_ns(kind, axis, size)  # type: ignore[arg-type]

    def reshard_table(
        self, sources: Sequence[Layout], targets: Sequence[Layout], dims: Dims, kind: TensorType, priced: PriceKind
    ) -> IntArray:
        """[sources, targets] ns: :meth:`reshard_ns`, :meth:`gradient_ns` or :meth:`input_ns` of all pairs."""
        return _reshard_table(self, tuple(sources), tuple(targets), dims, kind, priced)

    def pairs(self, dims: Dims, dtype: str, priced: PriceKind) -> tuple[KnownPairs, bool]:
        """Reshards that are priced already, and whether communication alone counts."""
        return _known_pairs(self, dims, dtype, priced), False

    def collective_ns(self, kind: MovingKind, axis: int | tuple[int, ...], size: int) -> int:
        """Time of a collective of ``size`` bytes (the full tensor of one rank; of a halo what one neighbour gets)."""
        if kind == "halo" or kind == "halo_sum":
            kind = "send"
        return _collective_ns(self, kind, axis, size)

    def stored_bytes(self, layout: Layout, dims: Dims, dtype: str) -> int:
        """Bytes of the largest shard."""
        return tensor_bytes(TensorShape((largest_size(dims, layout, self.mesh),), dtype))


def step_elements_held(step: Step, dims: Dims, mesh: Mesh) -> int:
    """Elements of the full tensor of the step on one rank (of the kept piece, for local steps)."""
    size = largest_size(dims, step.after, mesh)
    return max(size, largest_size(dims, step.before, mesh)) if step.kind in COLLECTIVES else size


def step_bytes(step: Step, dims: Dims, dtype: str, mesh: Mesh) -> int:
    """:func:`step_elements_held` in bytes."""
    return tensor_bytes(TensorShape((step_elements_held(step, dims, mesh),), dtype))


@lru_cache(maxsize=4096)
def _reshard_table(
    prices: Prices, sources: tuple[Layout, ...], targets: tuple[Layout, ...], dims: Dims, kind: TensorType,
    priced: PriceKind,
) -> IntArray:
    if len(sources) * len(targets) < PAIRS_ONE_BY_ONE:
        price = {"reshard": prices.reshard_ns, "gradient": prices.gradient_ns, "input": prices.input_ns}[priced]
        return np.array([[price(a, b, dims, kind) for b in targets] for a in sources], np.int64)
    known, sent = prices.pairs(dims, kind.dtype, priced)
    return known.table(sources, targets, sent)


@lru_cache(maxsize=4096)
def _known_pairs(prices: Prices, dims: Dims, dtype: str, priced: PriceKind) -> KnownPairs:
    return KnownPairs(dims, prices.mesh,
                      lambda step, axis, elements, shared: prices.move_ns(step, axis, elements, dtype, shared), priced)


@lru_cache(maxsize=500_000)
def _reshard_ns(prices: Prices, source: Layout, target: Layout, dims: Dims, dtype: str) -> int:
    return sum(prices.step_ns(s, dims, dtype) for s in reshard_steps(source, target, dims, prices.mesh))


@lru_cache(maxsize=200_000)
def _gradient_ns(prices: Prices, source: Layout, target: Layout, dims: Dims, dtype: str) -> int:
    total, last = 0, True
    for step in reversed(reshard_steps(source, target, dims, prices.mesh)):
        # what is read by more than reductions cannot wait for a full bucket (an alias is no step of the program)
        last = last and step.kind in ("all_reduce", "reduce_scatter", "alias")
        total += _in_bucket_ns(prices, step, dims, dtype) if last else prices.step_ns(step, dims, dtype)
    return total


@lru_cache(maxsize=200_000)
def _input_ns(prices: Prices, source: Layout, target: Layout, dims: Dims, dtype: str) -> int:
    total, first = 0, True
    for step in reshard_steps(source, target, dims, prices.mesh):
        gathered = first and step.kind == "all_gather"
        total += _in_bucket_ns(prices, step, dims, dtype) if gathered else prices.step_ns(step, dims, dtype)
        first = first and step.kind == "alias"
    return total


def _in_bucket_ns(prices: Prices, step: Step, dims: Dims, dtype: str) -> int:
    return prices.move_ns(step.kind, step.axis, step_elements_held(step, dims, prices.mesh), dtype, shared=True)


@lru_cache(maxsize=200_000)
def _collective_ns(prices: Prices, kind: CollectiveKind, axis: int | tuple[int, ...], size: int) -> int:
    return collective_ns(prices.cluster, prices.mesh.sizes, axis, kind, size)


def _expansion_ns(prices: Prices, expansion: Expansion) -> int:
    """Time of every step of an expansion, one after the other."""
    total = 0
    shapes = [TensorShape(kind.shape, kind.dtype) for kind in expansion.types]
    for step in expansion.steps:
        if isinstance(step, Exchange):
            size = tensor_bytes(TensorShape((step.elements,), expansion.types[step.value].dtype))
            total += prices.collective_ns(step.kind, step.axis, size)
        else:
            outputs = [None if v < 0 else shapes[v] for v in step.outputs]
            args = dict(zip(argument_names(step.op), step.args, strict=True))
            work = work_of(step.op, [shapes[v] for v in step.reads], outputs, args)
            total += compute_ns(prices.cluster.device, work)
    return total


def local_work(site: Site, choice: JointChoice, mesh: Mesh) -> Work:
    """Flops and bytes of the largest local call."""
    call = site.call
    inputs = [
        TensorShape(largest_shape(d, lay, mesh), t.dtype)
        for d, lay, t in zip(site.inputs, choice.inputs, call.inputs, strict=True)
    ]
    outputs = [
        None if t is None or d is None else TensorShape(largest_shape(d, lay, mesh), t.dtype)
        for d, lay, t in zip(site.outputs, choice.outputs, call.outputs, strict=True)
    ]
    # what runs may be another op, with other arguments: as_strided_scatter of a whole tensor is a reshape
    op, args = (call.op, call.args) if is_view_op(call.op) else local_call(site, choice, mesh, (0,) * len(mesh.axes))
    return work_of(op, inputs, outputs, dict(zip(argument_names(op), args, strict=True)))
