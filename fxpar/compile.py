"""From a model to a plan: capture, logical dims, search, and everything the plan file records."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import torch
from torch import nn

from fxpar.alternatives import alternatives
from fxpar.candidates import Found, Request, natural_meshes
from fxpar.captured import Captured, Semantics, capture_whole, in_microbatches
from fxpar.choose import choose
from fxpar.conflicts import explained
from fxpar.constraints import Constraints, apply, read_constraints
from fxpar.cost.cluster import Cluster, parse_cluster
from fxpar.model_source import ModelSource
from fxpar.open_model import open_model
from fxpar.optimizer_state import optimizer_bytes_of
from fxpar.plans.codec import program_digest
from fxpar.plans.errors import FxparError, Infeasible, PlanMismatch, UnsupportedError
from fxpar.plans.mesh import Mesh, parse_mesh
from fxpar.plans.plan import ASKED_FOR, NO_RULE, Candidate, Certificate, Considered, Decisions, Fingerprint, Plan
from fxpar.plans.program import Program
from fxpar.prices import Prices
from fxpar.progress import Progress, silent
from fxpar.random_plan import random_decisions
from fxpar.rare_collections import rare_collections
from fxpar.restrict import check_axis_names
from fxpar.rule_coverage import MissingRuleWarning, undeclared_ops
from fxpar.rules.choices import choice_by_names, sites_of
from fxpar.rules.fingerprint import rules_digest
from fxpar.runtime.parameters import module_sources
from fxpar.search import replace_status, run_search
from fxpar.show import gib
from fxpar.simulate import simulate
from fxpar.splits import BATCH_DIM, Named, named_dims
from fxpar.staged import stages_asked, with_stages
from fxpar.version import VERSION
from fxpar.work_bound import least_step_ns


@dataclass(frozen=True)
class CompileResult:
    """A plan, ready to be written."""

    plan: Plan


@rare_collections()
def compile_model(
    source: ModelSource,
    *,
    cluster: str | None = None,
    mesh: Mesh | str | None = None,
    memory: int | None = None,
    reserve: int | None = None,
    precision: str = "fp32",
    pins: Sequence[str] = (),
    hints: Sequence[Plan] = (),
    gap: float = 0.01,
    random_choices: int | None = None,
    zero: int | None = None,
    recompute: str | None = None,
    microbatches: int | None = None,
    semantics: Semantics = "exact",
    schedule: str | None = None,
    per_rank: int | None = None,
    outputs: Sequence[str] = ("loss",),
    captured: Captured | None = None,
    progress: Progress = silent,
) -> CompileResult:
    """Choose a plan for one training step of the model.

    Args:
        cluster: as for ``--cluster``; None: one node of CPU ranks as large as the mesh.
        mesh: as for ``--mesh``; None: meshes of the cluster's shape are tried.
        memory: bytes per device; None: what the cluster has.
        reserve: bytes of it that the plan leaves alone; None: what the cluster says, and nothing where ``memory`` is
            given.
        gap: stop when proven within this fraction of the best.
        zero: ZeRO stage: 0 (parameters stored whole on every axis but those called tp), 1 or 2 (cut on them, gathered
            copies kept from forward to backward), 3 (gathered again in backward); None: as is best.
        pins: what axes do to inputs and ops of a name, ``"embed*.weight=tp:Shard(0)"`` (see :mod:`fxpar.pins`); those
            of the source count as well.
        hints: plans of the same program and of a mesh that is tried; the search begins with their decisions.
        recompute: "auto" (node by node, as much as memory asks for), "on" (every repeated layer) or "off".
        microbatches: parts of the batch in time (1), all of one size.
        semantics: of them: "exact" (loss and gradients are those of the whole batch, or it is refused) or "accumulate"
            (each is a batch of its own; loss and gradients are averaged).
        schedule, per_rank: of a mesh with an axis pp, the pipeline's schedule (see :mod:`fxpar.schedules`; None: 1F1B)
            and how many stages each rank has (None: as many as it must, or 2).
        random_choices: a seed: any feasible plan instead of the best.
        outputs: ``("loss",)`` or ``("all",)``.
        captured: from :func:`capture_program` with the same outputs and precision, when several plans are made of one
            model.

    Raises:
        FxparError: with its subclasses, whatever stops the model, the request or the search.
    """
    constraints = read_constraints(zero, (*source.hints, *pins))
    unknown = sorted(set(outputs) - {"loss", "all"})
    if unknown:
        raise UnsupportedError(f"outputs {', '.join(unknown)} cannot be chosen by name in this version",
                               way_out="--outputs loss or --outputs all")
    wanted = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    staged = stages_asked(wanted, schedule, per_rank)
    searched = wanted if staged is None else staged.inside
    if searched is not None:
        check_axis_names(searched)
    machine = chosen_cluster(cluster, wanted)
    program, model = in_microbatches(
        source, captured or capture_whole(source, outputs, precision, progress), microbatches or 1, semantics, outputs,
        precision, progress,
    )
    optimizer_bytes = optimizer_bytes_of(source, list(model.named_parameters()))

    @cache
    def prices(of: Mesh) -> Prices:
        return Prices(machine, of) if staged is None else staged.prices(machine, of)

    budget, reserve = budget_of(machine, memory, reserve)
    candidates: list[Candidate] = []
    considered: tuple[Considered, ...] = ()
    words = ""
    pinned = bool(constraints) or (searched is not None and any(a.name in ("dp", "tp") for a in searched.axes))
    named = named_dims(program, source.batch_dim)
    tried: Sequence[Mesh] = (searched,) if searched is not None else natural_meshes(
        machine.nodes, machine.devices_per_node)
    tried = meshes_obeying(constraints, program, tried, named)
    begin = hinted_decisions(hints, program, tried)
    if random_choices is not None:
        applied = apply(constraints, program, tried[0], named)
        decisions = random_decisions(program, tried[0], random_choices, applied)
        prediction = simulate(program, decisions, prices(tried[0]), optimizer_bytes)
        certificate = Certificate("random", prediction.step_ns, 0, 1.0)
    else:
        within = budget if staged is None else budget * staged.ranks
        request = Request(program, prices, within, optimizer_bytes, source.batch_dim, gap, progress,
                          recompute or "auto", constraints, begin)

        def others(chosen: Decisions) -> list[tuple[str, Decisions]]:
            return alternatives(program, chosen, named, prices(chosen.mesh), within, optimizer_bytes, progress)

        def natural() -> tuple[Found, list[Candidate]]:
            try:
                return run_search(request, tried, pinned=pinned or bool(begin),
                                  others=None if pinned or staged is not None else others)
            except Infeasible as error:
                raise explained(error, request, tried) from None

        nothing_asked = wanted is None and not pinned and not begin and microbatches is None and per_rank is None
        deep = open_model(source, (program, model), outputs, precision, optimizer_bytes, progress
                                   ) if nothing_asked and machine.world_size > 1 else None
        if deep is not None:
            choice = choose(deep, machine, request, natural)
            program, decisions, prediction = choice.program, choice.decisions, choice.prediction
            certificate, candidates, considered = choice.certificate, list(choice.candidates), choice.considered
            words = choice.words
        else:
            found, candidates = natural()
            decisions, prediction = found.decisions, found.prediction
            # a bound under what the user asks for holds under that only
            certificate = replace_status(found.certificate, "pinned") if pinned else found.certificate
    with progress("looking for ops without a rule"):
        whole = undeclared_ops(program, prices(decisions.mesh), decisions)
    for item in whole:
        warnings.warn(item.text(), MissingRuleWarning, stacklevel=2)
    if staged is not None:
        with progress("cutting stages"):
            decisions, prediction, certificate, words = with_stages(
                staged, program, decisions, machine, optimizer_bytes, budget)
        # what was compared were plans for the ranks of one stage
        candidates = []
    certificate = msgspec.structs.replace(certificate, everywhere_ns=least_step_ns(program, machine))
    plan = Plan(
        program, decisions, str(machine.world_size) if cluster is None else cluster, budget, prediction,
        tuple(candidates), certificate, fingerprint(program, model),
        provenance=(("model", source.name), ("precision", precision), ("outputs", ",".join(outputs)),
                    ("optimizer state", "measured"), ("figures", f"simulated ({machine.origin} rates)"),
                    *((f"{ASKED_FOR}{number}", text) for number, text in enumerate(constraints.texts)),
                    *([(BATCH_DIM, str(source.batch_dim))] if source.batch_dim is not None else []),
                    *([("microbatches", microbatch_words(program, decisions))] if program.time is not None else []),
                    *([("stages", words)] if words else []),
                    *((f"{NO_RULE}{item.op}", item.text()) for item in whole)),
        reserve_bytes=reserve, considered=considered,
    )
    return CompileResult(plan)


def microbatch_words(program: Program, decisions: Decisions) -> str:
    """How a program repeats, for people."""
    if program.time is None:
        return "1"
    meaning = {
        "exact": "loss and gradients of the whole batch",
        "accumulate": "each a batch of its own, loss and gradients averaged: not those of the whole batch",
    }
    gradients = sum(o.kind == "gradient" for o in program.outputs)
    each = len(decisions.reduce_each)
    reduced = "by each" if each == gradients else "once a step" if not each else f"once a step, {each} by each"
    return (f"{program.time.count}, {program.time.semantics} ({meaning[program.time.semantics]}); gradients reduced "
            f"{reduced}")


def meshes_obeying(
    constraints: Constraints, program: Program, meshes: Sequence[Mesh], named: Named
) -> tuple[Mesh, ...]:
    """The meshes on which every pinned op and input has a choice.

    Raises:
        FxparError: on none of them; that of the first mesh, which names the pins.
    """
    fitting, problems = [], []
    for mesh in meshes:
        try:
            apply(constraints, program, mesh, named).check_possible()
            fitting.append(mesh)
        except FxparError as error:
            problems.append(error)
    if not fitting:
        raise problems[0]
    return tuple(fitting)


def hinted_decisions(
    hints: Sequence[Plan], program: Program, meshes: Sequence[Mesh]
) -> tuple[tuple[str, Decisions], ...]:
    """Decisions of the plans given as hints, each with the name it has among the candidates.

    Raises:
        PlanMismatch: a plan is of another program, of a mesh that is not tried, or was made with other rules.
    """
    result = []
    for number, plan in enumerate(hints):
        if program_digest(plan.program) != program_digest(program):
            raise PlanMismatch(
                "the plan given as a hint is of another program", where="--hint",
                numbers=f"it is of {dict(plan.provenance).get('model', 'a model')} and has {len(plan.program.nodes)} "
                        f"ops; this program has {len(program.nodes)}",
                way_out="give a plan made from the same model, sizes, precision and outputs",
            )
        mesh = plan.decisions.mesh
        if all(mesh.sizes != m.sizes for m in meshes):
            raise PlanMismatch(
                f"the plan given as a hint is for mesh {mesh}", where="--hint",
                numbers=f"meshes tried: {'; '.join(map(str, meshes))}",
                way_out=f"ask for its mesh (--mesh {'x'.join(map(str, mesh.sizes))}), or leave the hint out",
            )
        known = zip(sites_of(program), plan.decisions.choices, strict=True)
        if any(choice_by_names(site, names, mesh) is None for site, names in known):
            raise PlanMismatch("the plan given as a hint makes choices that the rules of its ops do not offer here",
                               where="--hint", way_out="compile it again with this fxpar, or leave the hint out")
        result.append((f"hint {number + 1}" if len(hints) > 1 else "hint", plan.decisions))
    return tuple(result)


def budget_of(machine: Cluster, memory: int | None, reserve: int | None) -> tuple[int, int]:
    """(bytes per device that a plan may fill, bytes that it leaves alone).

    Raises:
        FxparError: nothing is left.
    """
    whole = machine.device.memory_bytes if memory is None else memory
    if reserve is None:
        reserve = machine.reserve_bytes if memory is None else 0
    if whole <= reserve:
        raise FxparError(
            f"nothing is left of {gib(whole)} per device when {gib(reserve)} are reserved",
            way_out="reserve less (--reserve), or give more memory (--memory)",
        )
    return whole - reserve, reserve


def chosen_cluster(cluster: str | None, mesh: Mesh | None) -> Cluster:
    """The cluster asked for, or as many CPU ranks as the mesh has.

    Raises:
        FxparError: neither is given, or the mesh does not use every device of the cluster.
    """
    if cluster is None:
        if mesh is None:
            raise FxparError("neither a cluster nor a mesh is given", way_out="--cluster 2x8:h100, or --mesh 2x2")
        return parse_cluster(str(mesh.world_size))
    machine = parse_cluster(cluster)
    if mesh is not None and mesh.world_size != machine.world_size:
        raise FxparError(
            f"mesh {mesh} has {mesh.world_size} ranks and cluster {cluster} {machine.world_size} devices",
            way_out="give a mesh whose sizes multiply to the number of devices",
        )
    return machine


def fingerprint(program: Program, model: nn.Module) -> Fingerprint:
    """What the plan was made from."""
    return Fingerprint(
        program_digest(program), rules_digest(node.op for node in program.nodes),
        torch.__version__.partition("+")[0], VERSION, module_sources(model),
    )
