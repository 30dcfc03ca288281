"""Plans with stages: what is asked for (``--mesh pp=2,dp=2 --schedule 1f1b``), and the stages added to a plan found for
the mesh inside a stage.

The search for the best cuts, schedule and number of microbatches is not here: the schedule is the one asked for, cuts
make stages of about equal time, and placements are those found for the whole program on the ranks of one stage, within
the memory of all stages together. What each stage then takes is simulated, and refused where it does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fxpar.cost.cluster import Cluster
from fxpar.plans.errors import FxparError, Infeasible
from fxpar.plans.layout import REPLICATE, Layout
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.plan import Certificate, Decisions, Pipeline, Prediction
from fxpar.plans.program import Program
from fxpar.schedules import kind_of, make_schedule, stages_per_rank
from fxpar.show import gib
from fxpar.simulate import OptimizerBytes
from fxpar.simulate_stages import StagePrices, simulate_stages
from fxpar.stage_cuts import even_cuts, layer_of

AXIS = "pp"
DEFAULT_SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Staged:
    """A mesh with an axis of stages.

    Attributes:
        mesh: the whole mesh; ``axis`` is that of the stages.
        inside: the other axes (one of one rank where there are none), which placements are searched on.
    """

    mesh: Mesh
    axis: int
    inside: Mesh
    schedule: str
    per_rank: int

    @property
    def ranks(self) -> int:
        return self.mesh.sizes[self.axis]

    def prices(self, cluster: Cluster, mesh: Mesh) -> StagePrices:
        """Prices on the mesh inside a stage; groups lie where they lie in the whole mesh."""
        others = [a for a in range(len(self.mesh.axes)) if a != self.axis]
        return StagePrices(cluster, mesh, self.mesh.sizes, tuple(others or [self.axis]))


def stages_asked(mesh: Mesh | None, schedule: str | None, per_rank: int | None) -> Staged | None:
    """What is asked for, None where it is a plan without stages.

    Raises:
        FxparError: a schedule without stages, one that does not exist, or a number of stages per rank that it has not.
    """
    axis = next((i for i, a in enumerate(mesh.axes) if a.name == AXIS and a.size > 1), None) if mesh else None
    if mesh is None or axis is None:
        asked = "--schedule" if schedule is not None else "--stages-per-rank" if per_rank is not None else ""
        if asked:
            raise FxparError(f"{asked} is for plans with stages", where=asked,
                             way_out=f"name an axis of stages, such as --mesh {AXIS}=2,dp=2, or leave {asked} out")
        return None
    name = schedule or DEFAULT_SCHEDULE
    kind_of(name)
    others = tuple(a for i, a in enumerate(mesh.axes) if i != axis)
    return Staged(mesh, axis, Mesh(others or (Axis("a0", 1),)), name, stages_per_rank(name, per_rank))


def with_stages(
    staged: Staged, program: Program, inside: Decisions, cluster: Cluster, optimizer_bytes: OptimizerBytes, budget: int
) -> tuple[Decisions, Prediction, Certificate, str]:
    """The decisions on the whole mesh, what they cost, what is known of how good they are, and the stages in words.

    Args:
        inside: decisions for the whole program on the mesh inside a stage.
        budget: bytes per device.

    Raises:
        FxparError: there are no such stages, or no such schedule for these numbers.
        Infeasible: a stage does not fit the memory.
    """
    schedule = make_schedule(staged.schedule, staged.ranks, program.microbatches, staged.per_rank)
    cuts = even_cuts(program, inside, staged.prices(cluster, staged.inside), schedule.stages)
    alone = len(staged.mesh.axes) == 1

    def layout(found: Layout) -> Layout:
        return (REPLICATE,) if alone else (*found[: staged.axis], REPLICATE, *found[staged.axis :])

    decisions = msgspec.structs.replace(
        inside, mesh=staged.mesh,
        choices=tuple((".",) if alone else (*c[: staged.axis], ".", *c[staged.axis :]) for c in inside.choices),
        inputs=tuple(map(layout, inside.inputs)), outputs=tuple(map(layout, inside.outputs)),
        pipeline=Pipeline(staged.axis, cuts, schedule),
    )
    prediction, walk = simulate_stages(program, decisions, cluster, optimizer_bytes)
    if prediction.peak_bytes > budget:
        raise Infeasible(
            f"a stage does not fit: it needs {gib(prediction.peak_bytes)} of {gib(budget)} per device",
            where=f"{schedule.stages} stages of about equal time, schedule {schedule.name}, "
                  f"{schedule.microbatches} microbatches",
            numbers=f"parameters {gib(prediction.parameter_bytes)}, gradients {gib(prediction.gradient_bytes)}, "
                    f"optimizer {gib(prediction.optimizer_bytes)}, activations {gib(prediction.activation_bytes)}",
            way_out="more microbatches (--microbatches), --zero 3, --recompute on, or more ranks",
        )
    modules = [program.nodes[cut].module for cut in cuts]
    before = [layer_of(module) or module or "ops of the model itself" for module in modules]
    words = (f"{schedule.stages} on {AXIS}, cut before {', '.join(before[:6])}{' ...' if len(before) > 6 else ''}; "
             f"{schedule.name}, {schedule.microbatches} microbatches; ranks wait {walk.bubble:.0%} of the step")
    return decisions, prediction, Certificate("pinned", prediction.step_ns, 0, 1.0), words
