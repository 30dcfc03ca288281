"""The plan: what to run, how to place it, what to expect, and how good the choice is. Plain data, no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from fxpar.plans.layout import Layout
from fxpar.plans.mesh import Mesh
from fxpar.plans.program import Program
from fxpar.plans.schedule import Schedule

FORMAT_VERSION = 3
ASKED_FOR = "asked for "
"""Begins the provenance keys of the constraints a plan was made under; the value is as on the command line."""
NO_RULE = "no rule: "
"""Begins the provenance keys that name an op computed whole; the value says where and at what cost."""


class Pipeline(msgspec.Struct, frozen=True):
    """A program cut into stages along mesh axis ``axis``, on which nothing else is decided.

    ``cuts``: forward is cut before these nodes (see ``fxpar.plans.stages``); ``schedule``: what runs when.
    """

    axis: int
    cuts: tuple[int, ...]
    schedule: Schedule


class Decisions(msgspec.Struct, frozen=True):
    """Every decision of a plan.

    ``choices[n]``: per mesh axis the name of what it does to node ``n`` (see ``fxpar.rules.choices``).
    ``inputs`` / ``outputs``: the layout in which each program input is stored and each output is left.
    ``recompute``: forward nodes that backward runs again instead of keeping their results.
    ``reuse``: backward hubs, in order, that read the copy the forward hub of the same value made, instead of making
    their own (see ``fxpar.plans.lifetimes``).
    ``reduce_each``: of a program that repeats in time, the outputs (positions, gradients) that are brought into their
    layout after every microbatch, and added up there (ZeRO-2); the others are added up as backward leaves them and
    brought there once, at the end of the step. ``held``: inputs (positions, parameters) whose gathered, cast and
    otherwise derived copies are made once a step and live through all microbatches; else each microbatch makes them.
    ``pipeline``: the stages, None where every rank runs the whole program.
    """

    mesh: Mesh
    choices: tuple[tuple[str, ...], ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    recompute: tuple[int, ...] = ()
    reuse: tuple[int, ...] = ()
    reduce_each: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    pipeline: Pipeline | None = None


class CollectiveTotal(msgspec.Struct, frozen=True, array_like=True):
    """All collectives of one kind on one axis in a step: how many, bytes of the full tensors, predicted ns."""

    kind: str
    axis: str
    count: int
    bytes: int
    ns: int


class Prediction(msgspec.Struct, frozen=True):
    """What the simulator expects of one training step on one device (ns and bytes; all figures simulated)."""

    step_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    peak_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    collectives: tuple[CollectiveTotal, ...]


class Candidate(msgspec.Struct, frozen=True):
    """A named plan that was compared with the chosen one; ``prediction`` is None when it could not be built."""

    name: str
    mesh: Mesh
    fits: bool
    prediction: Prediction | None
    note: str = ""


class Considered(msgspec.Struct, frozen=True, array_like=True):
    """A shape that the search weighed: ``pp`` x ``dp`` x ``tp`` ranks and ``microbatches``, what it was estimated to
    take (ns, bytes), what it took when searched and simulated in full (None: it was not), and why it was not chosen
    (empty: it was)."""

    pp: int
    dp: int
    tp: int
    microbatches: int
    estimated_ns: int
    estimated_bytes: int
    step_ns: int | None
    lost: str


class Proof(msgspec.Struct, frozen=True):
    """A lower bound of a priced problem and what it rests on (see ``fxpar.solver.certificate``).

    ``multiplier``: the price of memory in ns per unit of the question, as numerator and denominator. ``links[i]``:
    which of ``vectors`` the second end of the i-th linked pair pays, in units of ``quantum_ns``.
    """

    bound_ns: int
    multiplier: tuple[int, int]
    quantum_ns: int
    vectors: tuple[tuple[int, ...], ...]
    links: tuple[int, ...]


class Question(msgspec.Struct, frozen=True):
    """Which problem was priced, with what the rest of the plan does not say.

    ``roles``: per mesh axis "dp", "tp" or "" (free). ``parameters_cut``: on dp axes all (True), none (False), or each
    as is best (None). ``recompute_free``: what runs again was chosen together with the placements; else it was given
    (the plan's). ``budget_units``: memory row in units of ``memory_unit`` bytes, None without one.
    ``optimizer_bytes``: per program input the optimizer's bytes per element. ``digest``: sha256 of the problem's
    numbers. ``rates``: the cluster as JSON.
    ``reuse``: which copies of parameters could be kept for backward (see ``Decisions.reuse``): "never" any, "always"
    all, or "free". ``zero`` and ``pins``: what the user asked for beyond that (see ``fxpar.constraints``).
    ``temporaries``: program values that the memory row counts besides parameters, gradients, optimizer state and what
    forward leaves for backward: those live at the plan's peak, one entry per tensor.
    ``reduce_each``: gradients are brought into their layout after every microbatch; ``hold``: copies of parameters are
    made once a step (see ``Decisions.reduce_each`` and ``Decisions.held``).
    """

    roles: tuple[str, ...]
    parameters_cut: bool | None
    batch_dim: int | None
    recompute_free: bool
    budget_units: int | None
    optimizer_bytes: tuple[int, ...]
    digest: str
    rates: bytes
    zero: int | None = None
    pins: tuple[str, ...] = ()
    reuse: Literal["never", "free", "always"] = "never"
    temporaries: tuple[int, ...] = ()
    memory_unit: int = 65536
    reduce_each: bool = False
    hold: bool = False


class Overlap(msgspec.Struct, frozen=True):
    """A bound that no schedule beats: a step is never shorter than its compute, nor than its communication, so never
    than any mixture. ``compute_quarters``: of 4, how much compute counts in it; the costs of the proof's problem are
    four times the mixture."""

    compute_quarters: int
    proof: Proof

    @property
    def bound_ns(self) -> int:
        return self.proof.bound_ns // 4


class Certificate(msgspec.Struct, frozen=True):
    """How far from optimal the priced problem's solution can be (ns; ``gap`` relative).

    ``bound_ns`` is what ``proof`` proves where there is one; "optimal" says that an exact search found nothing cheaper,
    which only another search can confirm. Random plans and plans of older versions have neither question nor proofs.
    ``everywhere_ns``: no plan on these devices takes less, of any mesh, stages, microbatches, schedule and overlap (see
    ``fxpar.work_bound``); 0: nothing is said.
    """

    status: Literal["optimal", "feasible", "pinned", "random"]
    cost_ns: int
    bound_ns: int
    gap: float
    question: Question | None = None
    proof: Proof | None = None
    overlap: Overlap | None = None
    everywhere_ns: int = 0


class Fingerprint(msgspec.Struct, frozen=True):
    """What the plan was made from. ``modules``: (class, sha256 of its source) of every module class of the model."""

    program: str
    rules: str
    torch: str
    fxpar: str
    modules: tuple[tuple[str, str], ...]


class Plan(msgspec.Struct, frozen=True):
    """A whole plan file. ``memory_bytes``: the budget per device, without the ``reserve_bytes`` that are left alone;
    ``provenance``: how it was made, for people; ``considered``: shapes weighed, where the shape was not asked for."""

    program: Program
    decisions: Decisions
    cluster: str
    memory_bytes: int
    prediction: Prediction
    candidates: tuple[Candidate, ...]
    certificate: Certificate
    fingerprint: Fingerprint
    provenance: tuple[tuple[str, str], ...] = ()
    reserve_bytes: int = 0
    considered: tuple[Considered, ...] = ()
