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
from fxpar.recompute import layer_of
from fxpar.schedules import kind_of, make_schedule, stages_per_rank
from fxpar.show import gib
from fxpar.simulate import OptimizerBytes
from fxpar.simulate_stages import StageCost, StagePrices, Walk, simulate_stages, stage_costs
from fxpar.stage_cuts import even_cuts

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
    decisions, prediction, walk = StageCutter(program, inside, cluster, optimizer_bytes).cut(staged)
    if prediction.peak_bytes > budget:
        pipeline = decisions.pipeline
        assert pipeline is not None
        schedule = pipeline.schedule
        raise Infeasible(
            f"a stage does not fit: it needs {gib(prediction.peak_bytes)} of {gib(budget)} per device",
            where=f"{schedule.stages} stages of about equal time, schedule {schedule.name}, "
                  f"{schedule.microbatches} microbatches",
            numbers=f"parameters {gib(prediction.parameter_bytes)}, gradients {gib(prediction.gradient_bytes)}, "
                    f"optimizer {gib(prediction.optimizer_bytes)}, activations {gib(prediction.activation_bytes)}",
            way_out="more microbatches (--microbatches), --zero 3, --recompute on, or more ranks",
        )
    return (decisions, prediction, Certificate("pinned", prediction.step_ns, 0, 1.0),
            stages_in_words(program, decisions, walk))


class StageCutter:
    """Cuts a program, decided on the mesh inside a stage, into stages; the schedules with as many stages per rank
    have the same cuts and costs, which are found once."""

    def __init__(
        self, program: Program, inside: Decisions, cluster: Cluster, optimizer_bytes: OptimizerBytes
    ) -> None:
        self.program, self.inside, self.cluster, self.optimizer_bytes = program, inside, cluster, optimizer_bytes
        self.cuts: dict[int, tuple[int, ...]] = {}
        self.costs: dict[int, tuple[StageCost, ...]] = {}

    def cut(self, staged: Staged) -> tuple[Decisions, Prediction, Walk]:
        """The decisions on the whole mesh, and what they cost.

        Raises:
            FxparError: there are no such stages, or no such schedule for these numbers.
        """
        schedule = make_schedule(staged.schedule, staged.ranks, self.program.microbatches, staged.per_rank)
        count = schedule.stages
        if count not in self.cuts:
            prices = staged.prices(self.cluster, staged.inside)
            self.cuts[count] = even_cuts(self.program, self.inside, prices, count)
        decisions = _on_whole_mesh(staged, self.inside, Pipeline(staged.axis, self.cuts[count], schedule))
        if count not in self.costs:
            self.costs[count] = stage_costs(self.program, decisions, self.cluster, self.optimizer_bytes)
        prediction, walk = simulate_stages(
            self.program, decisions, self.cluster, self.optimizer_bytes, self.costs[count])
        return decisions, prediction, walk


def _on_whole_mesh(staged: Staged, inside: Decisions, pipeline: Pipeline) -> Decisions:
    alone = len(staged.mesh.axes) == 1

    def layout(found: Layout) -> Layout:
        return (REPLICATE,) if alone else (*found[: staged.axis], REPLICATE, *found[staged.axis :])

    return msgspec.structs.replace(
        inside, mesh=staged.mesh,
        choices=tuple((".",) if alone else (*c[: staged.axis], ".", *c[staged.axis :]) for c in inside.choices),
        inputs=tuple(map(layout, inside.inputs)), outputs=tuple(map(layout, inside.outputs)), pipeline=pipeline,
    )


def stages_in_words(program: Program, decisions: Decisions, walk: Walk) -> str:
    """Where stages begin, when they run, and how long ranks wait."""
    pipeline = decisions.pipeline
    assert pipeline is not None
    schedule = pipeline.schedule
    modules = [program.nodes[cut].module for cut in pipeline.cuts]
    before = [layer_of(module) or module or "ops of the model itself" for module in modules]
    return (f"{schedule.stages} on {AXIS}, cut before {', '.join(before[:6])}{' ...' if len(before) > 6 else ''}; "
            f"{schedule.name}, {schedule.microbatches} microbatches; ranks wait {walk.bubble:.0%} of the step")
