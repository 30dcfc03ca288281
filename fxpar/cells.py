"""What one microbatch costs on the ranks that share it by tensor parallelism, as a function of the number of layers.

A cell is a size of the microbatch on one data-parallel rank, a number of tensor-parallel ranks, and whether layers run
again in backward. It is measured on models with two and three units of every stack: placements as people choose them
(weights cut, solved under that restriction), rewritten and replayed as any plan is. The cells of a cluster are few, and
every factorisation of it is made of them (see ``fxpar.outer``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fxpar.candidates import Request
from fxpar.cost.cluster import Cluster
from fxpar.often import ALONE, InTime
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.program import Program
from fxpar.progress import silent
from fxpar.recompute import recompute_nodes
from fxpar.replay_microbatches import kept_bytes, replay_pieces_memory
from fxpar.runtime.local import type_bytes
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.microbatches import split_pieces
from fxpar.search import Search
from fxpar.simulate import OptimizerBytes, replay, replay_static, replay_time
from fxpar.simulate_stages import StagePrices
from fxpar.solver.solve import solve

NEAR = 0.03
"""How near the best the placements of a cell are looked for."""


@dataclass(frozen=True)
class Amounts:
    """Of one microbatch on one rank: ns forward and backward, and of each what its collectives take of the link; bytes
    that forward keeps for backward and that come and go beside; bytes of stored parameters, of gradients and of
    optimizer state."""

    forward: float
    backward: float
    forward_link: float
    backward_link: float
    kept: float
    passing: float
    parameters: float
    gradients: float
    optimizer: float

    def plus(self, other: Amounts, times: float) -> Amounts:
        """``self + times * other``."""
        return Amounts(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Amounts)))

    def to(self, other: Amounts) -> Amounts:
        """``other - self``."""
        return other.plus(self, -1.0)


@dataclass(frozen=True)
class Cell:
    """``unit``: of one unit of every stack; ``rest``: of all that is outside of the stacks; ``units``: of the model."""

    unit: Amounts
    rest: Amounts
    units: int


@dataclass(frozen=True)
class Depths:
    """Programs of one microbatch: ``shallow``, and ``deeper`` by a unit of every stack (None: the model has no stacks,
    and counts as ``units`` equal parts). ``units``: of the whole model; ``shallow`` has ``first`` of them."""

    shallow: Program
    deeper: Program | None
    first: int
    units: int


def cell_of(
    depths: Depths, tensor: int, cluster: Cluster, optimizer_bytes: OptimizerBytes, batch_dim: int | None, *,
    again: bool,
) -> Cell:
    """Measure a cell.

    Args:
        tensor: ranks that share the microbatch.
        again: layers run again in backward.
    """
    nothing = Amounts(*(0.0 for _ in fields(Amounts)))
    shallow = _amounts(depths.shallow, tensor, cluster, optimizer_bytes, batch_dim, again=again)
    if depths.deeper is None:
        return Cell(nothing.plus(shallow, 1.0 / depths.units), nothing, depths.units)
    deeper = _amounts(depths.deeper, tensor, cluster, optimizer_bytes, batch_dim, again=again)
    unit = _not_negative(shallow.to(deeper))
    return Cell(unit, _not_negative(shallow.plus(unit, -float(depths.first))), depths.units)


def _not_negative(amounts: Amounts) -> Amounts:
    return Amounts(*(max(getattr(amounts, f.name), 0.0) for f in fields(Amounts)))


def _amounts(
    program: Program, tensor: int, cluster: Cluster, optimizer_bytes: OptimizerBytes, batch_dim: int | None, *,
    again: bool,
) -> Amounts:
    mesh = Mesh((Axis("tp" if tensor > 1 else "a0", tensor),))
    prices = StagePrices(cluster, mesh, (cluster.world_size // tensor, tensor), (1,))
    request = Request(program, lambda _: prices, cluster.device.memory_bytes, optimizer_bytes, batch_dim, NEAR, silent)
    repeated = recompute_nodes(program, "layers") if again else ()
    roles = ("tp",) if tensor > 1 else ("",)
    # copies that are computed with are made once a step: what becomes of them is for the estimate to weigh
    in_time = InTime(hold=True) if program.time is not None else ALONE
    formulation = Search(request).formulate(mesh, roles, False, None, repeated, "never", in_time)
    solution = solve(formulation.problem, gap=NEAR, effort=1)
    assert solution.assignment is not None  # no memory row: something is always possible
    decisions = formulation.decisions(solution.assignment)
    if program.time is None:
        found = replay(program, decisions, prices, optimizer_bytes).prediction
        # backward computes about twice what forward does
        return Amounts(
            found.step_ns / 3, found.step_ns * 2 / 3, found.communication_ns / 3, found.communication_ns * 2 / 3,
            found.activation_bytes, 0.0, found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes,
        )
    local = localise(program, decisions, (0,))
    parts = split_pieces(program, decisions, local)
    static = replay_static(program, local, optimizer_bytes, parts.epilogue)
    peak = replay_pieces_memory(program, parts).peak - static.parameters - static.gradients
    kept = kept_bytes(program, local, parts)
    held = sum(type_bytes(parts.forward.types[v]) for v in parts.hoisted)
    forward, backward = replay_time(parts.forward, prices), replay_time(parts.backward, prices)
    return Amounts(
        forward.step_ns, backward.step_ns, forward.communication_ns, backward.communication_ns, kept,
        max(peak - kept - held, 0), static.parameters, static.gradients, static.optimizer,
    )
