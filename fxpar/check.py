"""``fxpar check``: does a plan hold together here, and does it belong to this model?

Reading the file has checked that it is consistent in itself. Here: every op and choice is one that the rules of this
installation offer, the ranks' rewritten programs are one sequence of collectives, the versions are those the plan was
made with; with a model, that tracing it again gives the same program; with ``certificate``, everything that the
certificate claims (fxpar.certificate).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from fxpar.captured import capture_program
from fxpar.certificate import certificate_findings
from fxpar.finding import Finding
from fxpar.model_source import ModelSource
from fxpar.plans.errors import FxparError
from fxpar.plans.plan import Plan
from fxpar.plans.program import Arg, Dtype, Node, Program, Ref
from fxpar.progress import Progress, silent
from fxpar.rules.choices import choice_by_names, site_of
from fxpar.rules.fingerprint import rules_digest
from fxpar.runtime.model import check_ops, check_surface
from fxpar.runtime.parameters import differences, module_sources
from fxpar.runtime.rewrite.legality import collective_signature
from fxpar.runtime.rewrite.microbatches import pieces, signature
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.runtime.rewrite.stage_pieces import stage_decisions, stage_mesh, stage_pieces, stages_of
from fxpar.runtime.virtual import pieces_of_all, rewrite_all
from fxpar.runtime.virtual_stages import pieces_of_stages

ALL_RANKS = 64
"""Up to this many ranks every rank's program is rewritten; beyond, those at the first and last corner of the mesh."""
SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class CheckReport:
    """The answer of ``fxpar check``."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(f.outcome != "problem" for f in self.findings)

    def text(self) -> str:
        """One line per check and the verdict."""
        return "\n".join([*(f.line() for f in self.findings), "", "sound" if self.ok else "NOT sound"])

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [{"check": f.check, "outcome": f.outcome, "text": f.text} for f in self.findings]
        return {"ok": self.ok, "findings": rows}


def check_plan_with_model(
    plan: Plan, source: ModelSource | None = None, *, certificate: bool = False, progress: Progress = silent
) -> CheckReport:
    """Check a plan that was read (and so is consistent).

    Args:
        source: the model it should belong to; None: only what the plan itself can tell.
        certificate: also count cost and bounds again.

    Raises:
        FxparError: the model cannot be built or traced.
    """
    findings = [Finding("file", "ok", f"{len(plan.program.nodes)} ops, mesh {plan.decisions.mesh}, consistent")]
    findings += version_findings(plan)
    with progress("checking ops and choices"):
        findings += op_findings(plan)
    if all(f.outcome != "problem" for f in findings):
        with progress("rewriting the ranks' programs"):
            findings.append(sequence_finding(plan))
    if source is not None:
        findings += model_findings(plan, source, progress)
    if certificate:
        with progress("counting cost and bounds again"):
            findings += certificate_findings(plan)
    return CheckReport(tuple(findings))


def version_findings(plan: Plan) -> Iterator[Finding]:
    """Rules and torch of this installation beside those the plan was made with."""
    made, here = plan.fingerprint, torch.__version__.partition("+")[0]
    rules = rules_digest(node.op for node in plan.program.nodes)
    if made.rules == rules:
        yield Finding("rules", "ok", "those the plan was made with")
    else:
        text = f"{made.rules[:12]} made the plan, here {rules[:12]}: every choice is checked below"
        yield Finding("rules", "note", text)
    if made.torch == here:
        yield Finding("torch", "ok", here)
    else:
        yield Finding("torch", "note", f"{made.torch} made the plan, here {here}: the ops must mean the same in both")


def op_findings(plan: Plan) -> Iterator[Finding]:
    """Ops exist and have rules, choices are offered by them, layouts fit the surface."""
    try:
        check_ops(plan.program)
        yield Finding("ops", "ok", f"{len({n.op for n in plan.program.nodes})} different ops are known here")
    except FxparError as error:
        yield Finding("ops", "problem", str(error).removeprefix("fxpar: "))
        return
    wrong = list(choice_problems(plan))
    if wrong:
        more = [f"and {len(wrong) - SHOWN_PROBLEMS} more"] if len(wrong) > SHOWN_PROBLEMS else []
        yield Finding("choices", "problem", "\n".join([*wrong[:SHOWN_PROBLEMS], *more]))
    else:
        yield Finding("choices", "ok", "every op's choice is one its rule offers")
    try:
        check_surface(plan.program, plan.decisions)
    except FxparError as error:
        yield Finding("layouts", "problem", str(error).removeprefix("fxpar: "))


def choice_problems(plan: Plan) -> Iterator[str]:
    """Nodes whose choice their rule does not offer."""
    mesh = plan.decisions.mesh
    for index, (node, names) in enumerate(zip(plan.program.nodes, plan.decisions.choices, strict=True)):
        if choice_by_names(site_of(node, plan.program), names, mesh) is None:
            yield f"{place(index, node)}: no choice {' '.join(names)}"


def place(index: int, node: Node) -> str:
    """A node for people."""
    where = ", ".join(part for part in (node.module, node.source) if part)
    return f"op {index}, {node.op}" + (f" ({where})" if where else "")


def sequence_finding(plan: Plan) -> Finding:
    """The ranks would run one sequence of steps, so no collective waits for one that never comes."""
    mesh = plan.decisions.mesh
    try:
        if plan.decisions.pipeline is not None:
            return stages_finding(plan)
        if plan.program.time is not None:
            return repeated_finding(plan)
        if mesh.world_size <= ALL_RANKS:
            rewrite_all(plan.program, plan.decisions)
            return Finding("ranks", "ok", f"all {mesh.world_size} ranks run one sequence of collectives")
        corners = [(0,) * len(mesh.axes), tuple(n - 1 for n in mesh.sizes)]
        shapes = {collective_signature(rewrite(plan.program, plan.decisions, c)) for c in corners}
        if len(shapes) != 1:
            return Finding("ranks", "problem", "first and last rank would run different sequences of collectives")
        return Finding("ranks", "note", f"first and last of {mesh.world_size} ranks run one sequence of collectives; "
                                        f"the others were not rewritten")
    except (FxparError, ValueError) as error:
        return Finding("ranks", "problem", str(error).removeprefix("fxpar: "))


def stages_finding(plan: Plan) -> Finding:
    """:func:`sequence_finding` of a plan with stages; its schedule was checked when it was read."""
    pipeline, mesh = plan.decisions.pipeline, stage_mesh(plan.decisions)
    assert pipeline is not None
    schedule = pipeline.schedule
    what = f"the schedule runs {schedule.microbatches} microbatches through {schedule.stages} stages without deadlock"
    if mesh.world_size <= ALL_RANKS:
        pieces_of_stages(plan.program, plan.decisions)
        return Finding("ranks", "ok", f"{what}; in each, all {mesh.world_size} ranks run one sequence of collectives")
    stages = stages_of(plan.program, plan.decisions)
    corners = ((0,) * len(mesh.axes), tuple(n - 1 for n in mesh.sizes))
    for stage, decided in zip(stages.stages, stage_decisions(plan.program, plan.decisions, stages), strict=True):
        parts = [stage_pieces(stage, decided, corner).programs for corner in corners]
        if len({tuple(map(collective_signature, programs)) for programs in parts}) != 1:
            return Finding("ranks", "problem", "first and last rank would run different sequences of collectives")
    return Finding("ranks", "note", f"{what}; in each, first and last of {mesh.world_size} ranks run one sequence of "
                                    "collectives; the others were not rewritten")


def repeated_finding(plan: Plan) -> Finding:
    """:func:`sequence_finding` of a program that repeats in time."""
    mesh = plan.decisions.mesh
    if mesh.world_size <= ALL_RANKS:
        pieces_of_all(plan.program, plan.decisions)
        return Finding("ranks", "ok", f"all {mesh.world_size} ranks run one sequence of collectives, in "
                                      f"{plan.program.microbatches} microbatches")
    corners = ((0,) * len(mesh.axes), tuple(n - 1 for n in mesh.sizes))
    if len({signature(pieces(plan.program, plan.decisions, c)) for c in corners}) != 1:
        return Finding("ranks", "problem", "first and last rank would run different sequences of collectives")
    return Finding("ranks", "note", f"first and last of {mesh.world_size} ranks run one sequence of collectives; "
                                    f"the others were not rewritten")


# ------------------------------------------------------------------ against the model


def model_findings(plan: Plan, source: ModelSource, progress: Progress) -> Iterator[Finding]:
    """Parameters, sources and the traced program of a model beside the plan's."""
    made = dict(plan.provenance)
    outputs = tuple(made.get("outputs", "loss").split(","))
    program, model = capture_program(
        source, outputs=outputs, precision=made.get("precision", "fp32"), progress=progress,
        microbatches=plan.program.microbatches,
        semantics="exact" if plan.program.time is None else plan.program.time.semantics,
    )
    found = differences(plan, model)
    if found:
        more = [f"and {len(found) - SHOWN_PROBLEMS} more"] if len(found) > SHOWN_PROBLEMS else []
        yield Finding("model", "problem", "\n".join([*found[:SHOWN_PROBLEMS], *more]))
    else:
        yield Finding("model", "ok", "parameters, buffers and module sources are those of the plan")
    unseen = sources_not_found(plan, model)
    if unseen:
        yield Finding("sources", "note", f"not in this model: {', '.join(unseen)}")
    if program == plan.program:
        yield Finding("trace", "ok", f"traced again, the model gives the same {len(program.nodes)} ops")
        return
    difference = first_difference(plan.program, program)
    if difference:
        yield Finding("trace", "problem", difference)
    else:
        yield Finding("trace", "ok", f"the same {len(program.nodes)} ops; their source lines have moved")


def sources_not_found(plan: Plan, model: nn.Module) -> list[str]:
    """Module classes of the plan that the model has none of."""
    mine = {name.rpartition(".")[2] for name, _ in module_sources(model)}
    return [name for name, _ in plan.fingerprint.modules if name.rpartition(".")[2] not in mine]


def first_difference(old: Program, new: Program) -> str:
    """The first thing in which two programs differ (old: the plan's), "" when only labels do."""
    for what, mine, other in (("call", old.call, new.call), ("argument values", old.baked, new.baked),
                              ("output structure", old.structure, new.structure)):
        if mine != other:
            return f"the {what} of the model: the plan has {mine}, traced {other}"
    for was, now in zip_longest(old.inputs, new.inputs):
        if was is None or now is None:
            name = (was or now).name
            return f"the input {name} is only in {'the plan' if now is None else 'the traced model'}"
        if was != now or old.types[was.value] != new.types[now.value]:
            return (f"input {was.kind} {was.name} {type_text(old, was.value)} of the plan is now "
                    f"{now.kind} {now.name} {type_text(new, now.value)}")
    for index, (a, b) in enumerate(zip_longest(old.nodes, new.nodes)):
        if a is None or b is None:
            return f"{place(index, a or b)} is only in {'the plan' if b is None else 'the traced model'}"
        parts = list(node_differences(old, new, a, b))
        if parts:
            return "\n".join([f"the first op that differs is {place(index, b)}", *parts])
    for was_out, now_out in zip_longest(old.outputs, new.outputs):
        if was_out != now_out:
            return f"an output differs: the plan has {was_out}, traced {now_out}"
    if old.constants != new.constants:
        return "a constant tensor of the graph has other values"
    if old.dims != new.dims:
        return "the same ops, cut into other logical dims: another version of fxpar or of its rules made the plan"
    return ""


def node_differences(old: Program, new: Program, a: Node, b: Node) -> Iterator[str]:
    """What differs between two nodes at the same position (labels aside)."""
    if a.op != b.op:
        yield f"it was {a.op} ({', '.join(p for p in (a.module, a.source) if p)})"
        return
    for position, (x, y) in enumerate(zip_longest(a.args, b.args)):
        if x != y:
            yield f"argument {position} was {argument_text(old, x)}, is {argument_text(new, y)}"
    for position, (u, v) in enumerate(zip_longest(a.outputs, b.outputs)):
        if u is None or v is None or (u < 0) != (v < 0):
            yield f"result {position} is used in one of the two only"
        elif u >= 0 and old.types[u] != new.types[v]:
            yield f"result {position} was {type_text(old, u)}, is {type_text(new, v)}"
    if a.phase != b.phase:
        yield f"it ran in {a.phase}, now in {b.phase}"


def argument_text(program: Program, arg: Arg) -> str:
    """An argument with the types of its tensors."""
    if isinstance(arg, Ref):
        return f"v{arg.id} {type_text(program, arg.id)}"
    if isinstance(arg, Dtype):
        return arg.name
    if isinstance(arg, tuple):
        return "(" + ", ".join(argument_text(program, a) for a in arg) + ")"
    return repr(arg)


def type_text(program: Program, value: int) -> str:
    """``float32[2, 3]``."""
    kind = program.types[value]
    return f"{kind.dtype}{list(kind.shape)}"
