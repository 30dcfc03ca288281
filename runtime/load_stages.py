"""``fxpar.load`` of a plan with stages: the rank's stages, their parameters, and what runs them."""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch import nn

from fxpar.plans.codec import encode
from fxpar.plans.errors import FxparError, PlanFileError
from fxpar.plans.plan import Plan
from fxpar.plans.schedule import rank_of_stage
from fxpar.plans.stages import Stages
from fxpar.runtime.model import agree, check_model, check_ops, check_rules, check_surface
from fxpar.runtime.parameters import same_everywhere
from fxpar.runtime.pipeline import PipelineRunner
from fxpar.runtime.rewrite.legality import collective_signature
from fxpar.runtime.rewrite.stage_pieces import StagePieces, stage_decisions, stage_mesh, stage_pieces, stages_of
from fxpar.runtime.stage_body import StageBody
from fxpar.runtime.stage_groups import StageGroups, connect_stages
from fxpar.runtime.stage_parameters import shard_stages


def load_stages(plan: Plan, model: nn.Module, group: dist.ProcessGroup | None) -> PipelineRunner:
    """Make ``model`` this rank's part of the plan.

    Returns:
        What runs a step.

    Raises:
        PlanFileError: the plan does not hold together.
        PlanMismatch: another model, another number of ranks, or another plan on another rank.
    """
    pipeline = plan.decisions.pipeline
    assert pipeline is not None
    groups = connect_stages(plan.decisions.mesh, pipeline.axis, stage_mesh(plan.decisions), group)
    places = rank_of_stage(pipeline.schedule)
    problem: FxparError | None = None
    mark = sequence = ""
    try:
        check_ops(plan.program)
        check_rules(plan)
        check_surface(plan.program, plan.decisions)
        check_model(plan, model)
        stages, mine = own_stages(plan, places, groups)
        mark = hashlib.sha256(encode(plan)).hexdigest()
        sequence = " ".join(collective_signature(p) for parts in mine.values() for p in parts.programs)
    except FxparError as error:
        problem = error
    agree(mark, problem, groups.whole, sequence, groups.place)
    same_everywhere(model, groups.whole)
    held = shard_stages(model, plan.program, plan.decisions, stages, places, groups)
    bodies = {s: StageBody(parts, held, groups.inside) for s, parts in mine.items()}
    runner = PipelineRunner(plan.program, plan.decisions, stages, pipeline.schedule, places, bodies, held, groups)
    return runner


def own_stages(
    plan: Plan, places: tuple[int, ...], groups: StageGroups
) -> tuple[Stages, dict[int, StagePieces]]:
    """(all stages, what this rank runs of its own).

    Raises:
        PlanFileError: the decisions do not fit the program.
    """
    try:
        stages = stages_of(plan.program, plan.decisions)
        decisions = stage_decisions(plan.program, plan.decisions, stages)
        mine = {
            s: stage_pieces(one, decided, groups.inside.coords)
            for s, (one, decided) in enumerate(zip(stages.stages, decisions, strict=True)) if places[s] == groups.place
        }
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise PlanFileError(
            "the plan's program does not fit the rules of its ops", numbers=f"{type(error).__name__}: {error}",
            way_out="compile the plan again with `fxpar compile`",
        ) from error
    return stages, mine
