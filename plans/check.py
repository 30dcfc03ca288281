"""Is a plan consistent? Checked on every read, before anything of it is used; knows no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from fxpar.plans.dtypes import DTYPE_BYTES
from fxpar.plans.errors import PlanFileError
from fxpar.plans.layout import REPLICATE, Dims, Layout, Partial, global_shape, layout_text, valid_layout
from fxpar.plans.lifetimes import reuse_problems
from fxpar.plans.plan import Decisions, Plan
from fxpar.plans.program import Arg, Dtype, Input, Program, node_inputs, whole_type
from fxpar.plans.schedule import schedule_problems
from fxpar.plans.stages import cut_problems

NOTHING = (".",)
"""Choice of an axis that does nothing to an op."""
MAX_RANKS = 2**20
MAX_BYTES = 2**60
MAX_MICROBATCHES = 2**16


def check_plan(plan: Plan, *, where: str = "") -> None:
    """Refuse a plan that does not hold together.

    Raises:
        PlanFileError: with the first problems found (at most 5).
    """
    problems = [p for _, p in zip(range(5), plan_problems(plan), strict=False)]
    if problems:
        raise PlanFileError(
            "the plan is not consistent", where=where, numbers="; ".join(problems),
            way_out="compile the plan again with `fxpar compile`",
        )


def plan_problems(plan: Plan) -> Iterator[str]:
    """Every way in which the plan contradicts itself."""
    program, decisions = plan.program, plan.decisions
    axes = decisions.mesh.axes
    if not axes or any(a.size < 1 for a in axes) or math.prod(a.size for a in axes) > MAX_RANKS:
        yield f"mesh {decisions.mesh} has no ranks or more than {MAX_RANKS}"
        return
    if len({a.name for a in axes}) < len(axes):
        yield f"mesh {decisions.mesh} names an axis twice"
    yield from program_problems(program)
    if len(program.dims) != len(program.types):
        yield f"{len(program.dims)} logical dims for {len(program.types)} values"
        return
    for name, have, want in (("choices", decisions.choices, program.nodes), ("input layouts", decisions.inputs,
                             program.inputs), ("output layouts", decisions.outputs, program.outputs)):
        if len(have) != len(want):
            yield f"{len(have)} {name} for {len(want)}"
            return
    for node, choice in zip(program.nodes, decisions.choices, strict=True):
        if len(choice) != len(axes):
            yield f"{node.op} at {node.module or '(model)'} has {len(choice)} choices for {len(axes)} mesh axes"
    uses = [(i.value, lay, i.name) for i, lay in zip(program.inputs, decisions.inputs, strict=True)]
    uses += [(o.value, lay, o.name) for o, lay in zip(program.outputs, decisions.outputs, strict=True)]
    for value, layout, name in uses:
        if 0 <= value < len(program.dims):
            yield from _layout_problems(layout, program, value, name, len(axes))
    for index in decisions.recompute:
        if not 0 <= index < len(program.nodes) or program.nodes[index].phase != "forward":
            yield f"recompute names node {index}, which is no forward node"
    yield from reuse_problems(program, decisions)
    yield from _time_problems(program, decisions)
    yield from _pipeline_problems(program, decisions)
    yield from _certificate_problems(plan)


def _pipeline_problems(program: Program, decisions: Decisions) -> Iterator[str]:
    """Stages that do not fit the program, the mesh or their schedule."""
    pipeline, axes = decisions.pipeline, decisions.mesh.axes
    if pipeline is None:
        return
    schedule = pipeline.schedule
    if not 0 <= pipeline.axis < len(axes) or axes[pipeline.axis].size != len(schedule.ranks):
        yield f"the schedule is of {len(schedule.ranks)} ranks, axis {pipeline.axis} of mesh {decisions.mesh} is not"
        return
    if len(pipeline.cuts) + 1 != schedule.stages or schedule.microbatches != program.microbatches:
        yield (f"the schedule is of {schedule.stages} stages and {schedule.microbatches} microbatches, the program of "
               f"{len(pipeline.cuts) + 1} and {program.microbatches}")
    if any(choice[pipeline.axis : pipeline.axis + 1] != NOTHING for choice in decisions.choices):
        yield f"an op does something on mesh axis {axes[pipeline.axis].name}, which is that of the stages"
    if any(layout[pipeline.axis : pipeline.axis + 1] != (REPLICATE,)
           for layout in (*decisions.inputs, *decisions.outputs)):
        yield f"something is stored in pieces on mesh axis {axes[pipeline.axis].name}, which is that of the stages"
    yield from cut_problems(program, pipeline.cuts)
    yield from islice(schedule_problems(schedule), 5)


def _time_problems(program: Program, decisions: Decisions) -> Iterator[str]:
    """What does not fit of how a program repeats, and of decisions that only make sense where it does."""
    time = program.time
    for position in decisions.reduce_each:
        if time is None or not 0 <= position < len(program.outputs) or program.outputs[position].kind != "gradient":
            yield f"reduce_each names output {position}, which is no gradient of a program that repeats"
    for position in decisions.held:
        if time is None or not 0 <= position < len(program.inputs) or program.inputs[position].kind != "parameter":
            yield f"held names input {position}, which is no parameter of a program that repeats"
    if time is None:
        return
    if not 1 <= time.count <= MAX_MICROBATCHES:
        yield f"{time.count} microbatches"
    if len(time.inputs) != len(program.inputs) or len(time.outputs) != len(program.outputs):
        yield (f"{len(time.inputs)} inputs and {len(time.outputs)} outputs repeat of "
               f"{len(program.inputs)} and {len(program.outputs)}")
        return
    for index in time.once:
        if not 0 <= index < len(program.nodes) or program.nodes[index].phase != "forward":
            yield f"node {index} runs once, but is no forward node"
    for item, cut in zip(program.inputs, time.inputs, strict=True):
        rank = len(program.types[item.value].shape)
        if not -1 <= cut < rank or (cut >= 0 and item.kind not in ("input", "constant")):
            yield f"microbatches of {item.kind} {item.name} are cut along dim {cut} of {rank}"
    for output, join in zip(program.outputs, time.outputs, strict=True):
        if isinstance(join, int) and not 0 <= join < len(program.types[output.value].shape):
            yield f"microbatches of output {output.name} are joined along dim {join}"


def _certificate_problems(plan: Plan) -> Iterator[str]:
    """Proofs that no counting could make sense of; whether they prove anything is for `fxpar check --certificate`."""
    c = plan.certificate
    if c.question is not None:
        sizes = c.question.optimizer_bytes
        if len(sizes) != len(plan.program.inputs) or min(sizes, default=0) < 0:
            yield "the certificate's optimizer bytes are not one per input"
        if len(c.question.roles) != len(plan.decisions.mesh.axes):
            yield f"the certificate has {len(c.question.roles)} roles for {len(plan.decisions.mesh.axes)} mesh axes"
        if any(not 0 <= v < len(plan.program.types) for v in c.question.temporaries):
            yield "the certificate's memory row counts values that the program does not have"
        if c.question.budget_units is not None and c.question.budget_units < 0:
            yield f"the certificate's budget is {c.question.budget_units}"
        if not 1 <= c.question.memory_unit <= 65536:
            yield f"the certificate counts memory in units of {c.question.memory_unit} bytes"
    if c.overlap is not None and not 0 <= c.overlap.compute_quarters <= 4:
        yield f"the certificate counts {c.overlap.compute_quarters} quarters of compute"
    for proof in (c.proof, c.overlap.proof if c.overlap is not None else None):
        if proof is not None:
            if proof.multiplier[0] < 0 or proof.multiplier[1] < 1 or proof.quantum_ns < 1:
                yield f"a proof has multiplier {proof.multiplier} and quantum {proof.quantum_ns}"
            if any(not 0 <= link < len(proof.vectors) for link in proof.links):
                yield "a proof names payments that are not in the file"
            if not all(proof.vectors):
                yield "a proof has empty payments"


def _layout_problems(layout: Layout, program: Program, value: int, name: str, axes: int) -> Iterator[str]:
    if len(layout) != axes or not valid_layout(layout, program.dims[value]):
        yield f"layout {layout_text(layout)} of {name} does not fit {program.dims[value]} on {axes} axes"
    if any(isinstance(p, Partial) for p in layout):
        yield f"layout {layout_text(layout)} leaves {name} pending"


def program_problems(program: Program) -> Iterator[str]:
    """SSA order, shapes, and references of a program."""
    count = len(program.types)
    for index, kind in enumerate(program.types):
        if any(s < 0 for s in kind.shape) or math.prod(kind.shape) > MAX_BYTES:
            yield f"value {index} has shape {kind.shape}"
            return
        if kind.dtype not in DTYPE_BYTES:
            yield f"value {index} has dtype {kind.dtype!r}"
            return
    for index, dims in enumerate(program.dims):
        if index < count and (global_shape(dims) != program.types[index].shape or _negative(dims)):
            yield f"value {index} of shape {program.types[index].shape} has logical dims {dims}"
            return
    defined: set[int] = set()
    for item in program.inputs:
        if not 0 <= item.value < count or item.value in defined:
            yield f"input {item.name} defines value {item.value} again or out of range"
            return
        defined.add(item.value)
    yield from _constant_problems(program)
    yield from _name_problems(program)
    for node in program.nodes:
        for name in (n for arg in node.args for n in _dtypes(arg) if n not in DTYPE_BYTES):
            yield f"{node.op} at {node.module or '(model)'} names dtype {name!r}"
        missing = [v for v in node_inputs(node) if v not in defined]
        if missing:
            yield f"{node.op} at {node.module or '(model)'} reads value {missing[0]} before it is defined"
            return
        for value in node.outputs:
            if value != -1 and (not 0 <= value < count or value in defined):
                yield f"{node.op} at {node.module or '(model)'} defines value {value} again or out of range"
                return
            defined.add(value)
        defined.discard(-1)
    for output in program.outputs:
        if output.value not in defined:
            yield f"output {output.kind} {output.name} is value {output.value}, which nothing defines"
    if sum(o.kind == "loss" for o in program.outputs) != 1:
        yield "the program has no single loss"
    yield from _output_problems(program)


def _negative(dims: Dims) -> bool:
    return any(atom < 0 for atoms in dims for atom in atoms)


def _dtypes(arg: Arg) -> Iterator[str]:
    if isinstance(arg, Dtype):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _dtypes(item)


def _constant_problems(program: Program) -> Iterator[str]:
    """Constants that are not there, or hold another number of bytes than their type has."""
    for index, constant in enumerate(program.constants):
        size = math.prod(constant.type.shape) * DTYPE_BYTES.get(constant.type.dtype, 0)
        if size != len(constant.data) or any(n < 0 for n in constant.type.shape):
            yield f"constant {index} of type {constant.type} has {len(constant.data)} bytes"
    numbers = {str(index): constant for index, constant in enumerate(program.constants)}
    for position, item in enumerate(program.inputs):
        if item.kind == "constant":
            if item.name not in numbers:
                yield f"constant {item.name[:20]} is not in the file"
            elif numbers[item.name].type != (kind := whole_type(program, position)):
                yield f"constant {item.name} is {numbers[item.name].type}, not {kind}"


def _name_problems(program: Program) -> Iterator[str]:
    """Names that two inputs have. One and the same input may be read whole and, apart, cut in time."""
    seen: set[tuple[bool, bool, str]] = set()
    cuts = program.time.inputs if program.time is not None else ()
    for position, item in enumerate(program.inputs):
        if item.kind in ("parameter", "buffer", "input"):
            for name in (item.name, *item.ties):
                key = (item.kind == "input", position < len(cuts) and cuts[position] >= 0, name)
                if key in seen:
                    yield f"{item.kind} {name} is there twice"
                seen.add(key)


def _output_problems(program: Program) -> Iterator[str]:
    """Gradients and new buffers that do not belong to a parameter or buffer of the same type and logical dims."""
    stored: dict[tuple[str, str], Input] = {(i.kind, i.name): i for i in program.inputs}
    for output in program.outputs:
        if output.kind in ("gradient", "buffer"):
            entry = stored.get(("parameter" if output.kind == "gradient" else "buffer", output.name))
            if entry is None:
                yield f"the {output.kind} of {output.name} belongs to nothing"
            elif 0 <= output.value < len(program.types):
                have, want = (_described(program, v) for v in (output.value, entry.value))
                if have != want:
                    yield f"the {output.kind} of {output.name} is {have}, not {want}"


def _described(program: Program, value: int) -> str:
    kind = program.types[value]
    return f"{kind.dtype}{list(kind.shape)} {program.dims[value] if value < len(program.dims) else ''}"
