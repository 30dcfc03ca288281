"""``fxpar verify``: a plan's program on ranks against the model on one device.

In goes a plan and its model; out comes a :class:`~fxpar.comparison.Comparison` of loss, every gradient, every buffer
(and outputs, when the plan returns them). The reference is the eager model, except for a program that draws random
numbers: eager PyTorch draws others, so there the reference is the same program run whole with the same seed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from fxpar.capture.retype import ALL_DOUBLE, retype
from fxpar.captured import capture_program
from fxpar.comparison import Comparison, Row, compare_kind
from fxpar.model_source import OPTIMIZERS, ModelSource
from fxpar.plans.codec import encode
from fxpar.plans.errors import FxparError, UnsupportedError
from fxpar.plans.plan import Plan
from fxpar.plans.program import Program
from fxpar.progress import Progress, silent
from fxpar.ranks import run_ranks
from fxpar.reference import DTYPES, EagerMicrobatches, EagerStep, ProgramStep, Training, built, train_one_process, widen
from fxpar.runtime.interpret import torch_dtype
from fxpar.runtime.model import check_model, check_ops, step_seed
from fxpar.runtime.virtual import run_virtual
from fxpar.step_values import StepResults, draws_random_numbers, input_values, named_results, returns_outputs

TOLERANCES = {"f32": 1e-4, "f64": 1e-9}
VIRTUAL_F64_TOLERANCE = 1e-10
ROUNDINGS = 4
"""Steps of a float type narrower than float32 that are allowed where a program computes in one."""
NO_DOUBLE = frozenset({"aten._grouped_mm.default"})
"""Ops of programs that compute in bfloat16 for which torch has no float64 kernel."""
SEED = 0
"""Where random streams start, in the reference and on ranks."""
RANKS_SECONDS = 900.0
"""Until ranks that say nothing are stopped."""

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """What must come out: one step, and a short training where ranks are real."""

    step: StepResults
    training: Training | None
    origin: str


def verify_plan(
    plan: Plan,
    source: ModelSource,
    *,
    ranks: Literal["virtual", "gloo"] = "virtual",
    dtype: Literal["f32", "f64"] = "f64",
    reference: str | None = None,
    memory: bool = False,
    progress: Progress = silent,
    timeout: float = RANKS_SECONDS,
) -> Comparison:
    """Run one training step (on real ranks also a short training) and compare with one device.

    Args:
        plan: for this model.
        source: the model.
        ranks: ``"virtual"``: all ranks in lockstep in this process; ``"gloo"``: one process each.
        dtype: f64: all floating-point numbers of both sides are double; f32: they are as the model makes them.
        reference: a file with ``init_state``, ``loss``, ``grads``, ``buffers_after`` of a one-device run; None: the
            model is run here.
        memory: also compare the peak of live bytes (real ranks in f32 only).
        timeout: seconds that real ranks may take.

    Raises:
        PlanMismatch: the plan is not for this model.
        PlanFileError: the plan calls an op that a plan may not call.
        FxparError: the reference cannot be read, or the model cannot run.
    """
    if memory and (ranks, dtype) != ("gloo", "f32"):
        raise UnsupportedError(
            f"live bytes cannot be compared with --ranks {ranks} --dtype {dtype}",
            way_out="--memory needs --ranks gloo --dtype f32, which is what the prediction is for",
        )
    with progress("building the model"):
        check_model(plan, built(source, torch.float32))
        check_ops(plan.program)
        record = None if reference is None else read_record(reference)
        state: State | None = None if record is None else record["init_state"]
        typed = plan if dtype == "f32" else in_double(plan)
    with progress("running the reference on one device"):
        want = (
            reference_of(typed, source, dtype, state, train=ranks == "gloo")
            if record is None else Reference(recorded(record), None, str(reference))
        )
    title = f"{source.name} on mesh {plan.decisions.mesh} ({ranks} ranks, {dtype}) against {want.origin}"
    tolerance = VIRTUAL_F64_TOLERANCE if (ranks, dtype) == ("virtual", "f64") else TOLERANCES[dtype]
    if record is not None:
        tolerance = TOLERANCES["f32"]  # a record is as exact as the run that made it
    if dtype == "f32" or record is not None:
        tolerance = max(tolerance, coarsest(plan.program))
    if ranks == "virtual":
        with progress(f"running {plan.decisions.mesh.world_size} virtual ranks"):
            got, failures = run_virtual_ranks(typed, source, dtype, state)
        return Comparison(title, tuple(step_rows(want.step, got, tolerance, typed)), tuple(failures))
    with progress(f"running {plan.decisions.mesh.world_size} gloo ranks"):
        return run_gloo_ranks(typed, source, dtype, state, want, tolerance, title, timeout, memory)


def in_double(plan: Plan) -> Plan:
    """The plan with its program in float64, whatever it was in.

    Raises:
        UnsupportedError: torch has no float64 kernel for one of its ops.
    """
    without = sorted({node.op for node in plan.program.nodes} & NO_DOUBLE)
    if without:
        raise UnsupportedError(
            f"this plan cannot be compared in float64: torch has no float64 kernel for {', '.join(without)}",
            way_out="--dtype f32",
        )
    return msgspec.structs.replace(plan, program=retype(plan.program, ALL_DOUBLE))


def coarsest(program: Program) -> float:
    """What rounding may do to results: ``ROUNDINGS`` steps of the narrowest float type in the program."""
    dtypes = {torch_dtype(kind.dtype) for kind in program.types}
    return ROUNDINGS * max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)


def reference_of(
    plan: Plan, source: ModelSource, dtype: str, state: State | None, *, train: bool
) -> Reference:
    """Run the reference of a plan (its program already in ``dtype``)."""
    model = built(source, DTYPES[dtype], state)
    program = plan.program
    step: EagerStep | ProgramStep
    if draws_random_numbers(program):
        step = ProgramStep(whole_program(plan, source, dtype), source, model, DTYPES[dtype],
                           lambda i: step_seed(SEED, i))
        origin = "the same program run whole with the same random numbers"
    elif program.time is not None and program.time.semantics == "accumulate":
        step = EagerMicrobatches(source, model, DTYPES[dtype], program)
        origin = f"eager on one device, {program.time.count} microbatches, each a batch of its own"
    else:
        step = EagerStep(source, model, DTYPES[dtype])
        origin = "eager on one device"
    first = step()
    training = train_one_process(model, first.loss, step) if train else None
    return Reference(first, training, origin)


def whole_program(plan: Plan, source: ModelSource, dtype: str) -> Program:
    """The plan's program of the whole batch: of one that repeats exactly, captured again."""
    program = plan.program
    if program.time is None or program.time.semantics == "accumulate":
        return program
    made = dict(plan.provenance)
    whole, _ = capture_program(source, outputs=tuple(made.get("outputs", "loss").split(",")),
                               precision=made.get("precision", "fp32"), progress=silent)
    return whole if dtype == "f32" else retype(whole, ALL_DOUBLE)


def run_virtual_ranks(
    plan: Plan, source: ModelSource, dtype: str, state: State | None
) -> tuple[StepResults, list[str]]:
    """One step on virtual ranks: global results, and what replicas disagree about."""
    model = built(source, DTYPES[dtype], state)
    args, kwargs = widen(source.example_inputs(), DTYPES[dtype])
    program = plan.program
    result = run_virtual(program, plan.decisions, input_values(program, model, args, kwargs, seed=step_seed(SEED, 0)))
    failures = [
        f"ranks that hold the same part of {o.kind} {o.name} differ by {apart:.1e}"
        for o, apart in zip(program.outputs, result.disagreement, strict=True) if apart != 0.0
    ]
    return named_results(program, model, result.outputs), failures


def step_rows(want: StepResults, got: StepResults, tolerance: float, plan: Plan) -> list[Row]:
    """Every tensor of one step, compared in the reference's dtypes."""
    rows = compare_kind("loss", {"loss": want.loss}, {"loss": got.loss.to(want.loss.dtype)}, tolerance)
    rows += compare_kind("gradient", want.gradients, like(got.gradients, want.gradients), tolerance)
    rows += compare_kind("buffer", want.buffers, like(got.buffers, want.buffers), tolerance)
    if returns_outputs(plan.program):
        reference = {str(i): t for i, t in enumerate(want.outputs)}
        rows += compare_kind("output", reference, like({str(i): t for i, t in enumerate(got.outputs)}, reference),
                             tolerance)
    return rows


def like(
    got: Mapping[str, torch.Tensor | None], want: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """Floating tensors in the reference's precision where that is lower (a float32 record of a double run)."""
    result: dict[str, torch.Tensor | None] = {}
    for name, tensor in got.items():
        other = want.get(name)
        if tensor is not None and other is not None and tensor.dtype.is_floating_point == other.dtype.is_floating_point:
            result[name] = tensor.to(other.dtype) if tensor.itemsize > other.itemsize else tensor
        else:
            result[name] = tensor
    return result


def training_rows(want: Training, got: Training, tolerance: float) -> list[Row]:
    """Losses, norms and parameters of a short training; ten times the tolerance of a step, as errors build up."""
    def numbers(values: list[float]) -> dict[str, torch.Tensor | None]:
        return {f"step {i}": torch.tensor(v, dtype=torch.float64) for i, v in enumerate(values)}

    tolerance *= 10
    return [
        *compare_kind("train loss", numbers(want.losses), numbers(got.losses), tolerance),
        *compare_kind("train norm", numbers(want.norms), numbers(got.norms), tolerance),
        *compare_kind("trained", want.parameters, got.parameters, tolerance),
    ]


def run_gloo_ranks(
    plan: Plan, source: ModelSource, dtype: str, state: State | None, want: Reference, tolerance: float,
    title: str, timeout: float, memory: bool,
) -> Comparison:
    """One step and a short training on real ranks."""
    if not source.path:
        raise FxparError("a model made in memory cannot be given to other processes", way_out="write a model.py")
    with tempfile.TemporaryDirectory(prefix="fxpar-verify-") as folder:
        place = Path(folder)
        (place / "plan.msgpack").write_bytes(encode(plan))
        if state is not None:
            torch.save(dict(state), place / "state.pt")
        request = {
            "model": f"hf:{source.path}" if "task" in source.meta else source.path,
            **{k: source.meta.get(k) if "task" in source.meta else None for k in ("task", "seq", "batch")},
            "optimizer": next((n for n, made in OPTIMIZERS.items() if made is source.optimizer), None),
            "dtype": dtype, "seed": SEED, "train": want.training is not None, "memory": memory,
        }
        (place / "request.json").write_text(json.dumps(request))
        end = run_ranks(plan.decisions.mesh.world_size, ["-m", "fxpar.verify_worker", folder], timeout=timeout)
        failures = list(end.failures)
        if failures or not (place / "result.pt").exists():
            return Comparison(title, (), tuple(failures) or ("the ranks left no result",))
        found: dict[str, Any] = torch.load(place / "result.pt", weights_only=True)
    got = StepResults(found["loss"], found["gradients"], found["buffers"], tuple(found["outputs"]))
    rows = step_rows(want.step, got, tolerance, plan)
    if want.training is not None:
        rows += training_rows(want.training, Training(**found["training"]), tolerance)
    notes: list[str] = []
    if memory:
        note, ok = memory_note(plan, found["peak_bytes"])
        (notes if ok else failures).append(note)
    return Comparison(title, tuple(rows), tuple(failures), tuple(notes))


MEMORY_TOLERANCE = 0.03


def memory_note(plan: Plan, peaks: list[int]) -> tuple[str, bool]:
    """Largest peak of live tensor bytes of any rank, optimizer state included, beside the prediction."""
    want, got = plan.prediction.peak_bytes, max(peaks)
    ok = abs(got - want) <= MEMORY_TOLERANCE * want
    return f"peak of live bytes in a step: {got} measured here, {want} predicted ({got / want - 1:+.1%})", ok


def read_record(path: str) -> dict[str, Any]:
    """A record of a one-device run.

    Raises:
        FxparError: it cannot be read, or lacks a part.
    """
    way_out = "it is a torch.save of a dict with init_state, loss, grads and buffers_after"
    try:
        record = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise FxparError(
            f"cannot read the reference {path}", numbers=f"{type(error).__name__}: {first}", way_out=way_out
        ) from error
    missing = [k for k in ("init_state", "loss", "grads", "buffers_after")
               if not isinstance(record, dict) or k not in record]
    if missing:
        raise FxparError(f"the reference {path} has no {', '.join(missing)}", way_out=way_out)
    return dict(record)


def recorded(record: Mapping[str, Any]) -> StepResults:
    """The results that a record holds."""
    return StepResults(
        record["loss"], dict(record["grads"]), dict(record["buffers_after"]), tuple(record.get("outputs", ()))
    )
