"""What a search is asked for and what it finds: requests, meshes tried, plans made by hand, and how candidates rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from fxpar.constraints import UNCONSTRAINED, Constraints
from fxpar.formulate import Formulation
from fxpar.often import InTime
from fxpar.plans.errors import Infeasible
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.plan import Candidate, Certificate, Decisions, Prediction
from fxpar.plans.program import Program
from fxpar.prices import Prices
from fxpar.progress import Progress
from fxpar.show import gib
from fxpar.simulate import OptimizerBytes, Replayed
from fxpar.solver.warm import Start


@dataclass(frozen=True)
class Flight:
    """That the program will be cut into stages, the first of which has ``microbatches`` in flight.

    Placements are looked for within the memory of all stages together: what stays is on one of them, what forward keeps
    is there once for each microbatch in flight. What each stage really needs is simulated when it has been cut.
    """

    microbatches: int

    def bytes_together(self, replayed: Replayed) -> int:
        """Of all stages, when each is as full as the first: from the replay of the whole program on one."""
        return replayed.prediction.peak_bytes + (self.microbatches - 1) * replayed.kept


@dataclass(frozen=True, eq=False)
class Request:
    """What is searched: the program (dims and hubs in), prices per mesh and limits.

    ``recompute``: "auto" (node by node, where memory asks for it), "on" (every repeated layer whole) or "off".
    ``constraints``: what chosen plans must obey beyond that. ``hints``: decisions to begin with, each with a name.
    ``flight``: of a program that will be cut into stages; ``budget_bytes`` is then that of all of them together.
    ``in_time``: what of a program that repeats is done once a step, None: what is best.
    """

    program: Program
    prices: Callable[[Mesh], Prices]
    budget_bytes: int
    optimizer_bytes: OptimizerBytes
    batch_dim: int | None
    gap: float
    progress: Progress
    recompute: str = "off"
    constraints: Constraints = UNCONSTRAINED
    hints: tuple[tuple[str, Decisions], ...] = ()
    flight: Flight | None = None
    in_time: InTime | None = None


@dataclass(frozen=True)
class Found:
    """One simulated candidate; ``obeys``: it does what the names of the mesh's axes and the constraints ask for;
    ``counted``: bytes that the memory row of its problem knows of; ``at_peak``: values that live at its peak;
    ``waited``: of values, what the step waits for (``Replayed.waited``)."""

    name: str
    decisions: Decisions
    prediction: Prediction
    certificate: Certificate
    fits: bool
    obeys: bool = True
    counted: int = 0
    at_peak: tuple[int, ...] = ()
    waited: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    # what the certificate is made from: the problem solved, its price of memory (and the messages that go with it), and
    # how parameters may be stored
    formulation: Formulation | None = None
    multiplier: Fraction = Fraction(0)
    start: Start | None = None
    parameters_cut: bool | None = False

    def candidate(self) -> Candidate:
        """As the plan file records it."""
        again = len(self.decisions.recompute)
        note = f"recomputes {again} nodes" if again else ""
        return Candidate(self.name, self.decisions.mesh, self.fits, self.prediction, note)


def natural_meshes(nodes: int, devices: int) -> tuple[Mesh, ...]:
    """Meshes tried when the user names none: the cluster's own shape; of several nodes all ranks on one axis, too (an
    all-reduce over all of them beats one within and one between nodes); one more axis inside a node of 4 or more."""
    shapes: list[tuple[int, ...]] = [tuple(n for n in (nodes, devices) if n > 1) or (1,)]
    if nodes > 1 and devices > 1:
        shapes.append((nodes * devices,))
    if nodes == 1 and devices >= 4 and devices % 2 == 0:
        shapes.append((2, devices // 2))
    return tuple(Mesh(tuple(Axis(f"a{i}", n) for i, n in enumerate(s))) for s in shapes)


def manual_roles(mesh: Mesh) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
    """Hand-made plans on a mesh of free axes: (name, roles, parameters cut on dp)."""
    axes = len(mesh.axes)
    tensor = (*("dp",) * (axes - 1), "tp")
    return (
        ("data parallel", ("dp",) * axes, False),
        ("ZeRO-3", ("dp",) * axes, True),
        ("Megatron tensor parallel" if axes == 1 else "data + Megatron tensor parallel", tensor, False),
    )


def rank(found: Found) -> tuple[bool, int]:
    """What fits comes first, the fastest of it; of what does not, the smallest."""
    return not found.fits, found.prediction.step_ns if found.fits else found.prediction.peak_bytes


def smaller(one: Found, other: Found | None) -> Found:
    return one if other is None or one.prediction.peak_bytes <= other.prediction.peak_bytes else other


def too_large(tried: Sequence[Found], budget: int) -> Infeasible:
    """The error when nothing that is allowed fits, with the parts of the smallest plan that was tried."""
    way_out = "give more devices (--cluster, --mesh), more memory (--memory), or a smaller batch"
    small = [f for f in tried if f.fits]
    if small:
        best = min(small, key=lambda f: f.prediction.step_ns)
        sizes = "x".join(map(str, best.decisions.mesh.sizes))
        return Infeasible(
            f"no plan with these mesh axes fits in {gib(budget)} per device", where=f"--mesh {best.decisions.mesh}",
            numbers=f"{best.name} on the same devices needs {gib(best.prediction.peak_bytes)}",
            way_out=f"leave the axes anonymous (--mesh {sizes}), or {way_out}",
        )
    if not tried:
        return Infeasible(f"the model does not fit: no plan found within {gib(budget)} per device", way_out=way_out)
    least = min(tried, key=lambda f: f.prediction.peak_bytes)
    p = least.prediction
    return Infeasible(
        f"the model does not fit: it needs {gib(p.peak_bytes)} of {gib(budget)} per device",
        where=f"the smallest plan found: {least.name} on {least.decisions.mesh}",
        numbers=f"parameters {gib(p.parameter_bytes)}, gradients {gib(p.gradient_bytes)}, "
                f"optimizer {gib(p.optimizer_bytes)}, activations {gib(p.activation_bytes)}; "
                f"{gib(p.peak_bytes - budget)} too much",
        way_out=way_out,
    )
