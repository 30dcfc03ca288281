"""Plans with stages of the models in tests/models, and a short training under them on ranks beside one process."""

from __future__ import annotations

import functools
import importlib.util
import random
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fxpar.capture import capture
from fxpar.capture.retype import ALL_DOUBLE, retype
from fxpar.hubs import insert_hubs
from fxpar.logical_dims import analyse
from fxpar.microbatches import split_in_time
from fxpar.plans.layout import Replicate
from fxpar.plans.mesh import Axis, Mesh, parse_mesh
from fxpar.plans.plan import Certificate, Decisions, Fingerprint, Pipeline, Plan, Prediction
from fxpar.reference import computing_in, widen, widen_module
from fxpar.runtime.interpret import run_global
from fxpar.runtime.model import load, step_seed
from fxpar.schedules import make_schedule
from fxpar.step_values import draws_random_numbers, input_values, named_results
from tests.runtime.small_programs import random_decisions
from tools.forked_ranks import forked_ranks

STEPS = 5
NOTHING = Prediction(0, 0, 0, 0, 0, 0, 0, 0, 0, ())


BATCH = 8


@functools.cache
def module_of(name):
    """The model with a batch that divides into 8 microbatches."""
    place = Path(__file__).parent.parent / "models" / f"{name}.py"
    found = importlib.util.spec_from_file_location(f"batch_of_{BATCH}_{name}", place)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    sized = getattr(module, "_bert", module)  # the model whose inputs these are
    assert sized.BATCH
    sized.BATCH = BATCH
    return module


def built(name):
    torch.manual_seed(0)
    return widen_module(module_of(name).build(), torch.float64)


def batch(name):
    return widen(module_of(name).example_inputs(), torch.float64)


@functools.cache
def whole_program(name):
    """Of the whole batch, in float64."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = module_of(name).build()
    args, kwargs = module_of(name).example_inputs()
    loss = getattr(module_of(name), "loss", None)
    return retype(analyse(insert_hubs(capture(model, args, kwargs, **({"loss": loss} if loss else {})))), ALL_DOUBLE)


def staged_plan(name, mesh, schedule, microbatches, per_rank=None, seed=0, choices=None):
    """A plan with stages of about as many ops; ``choices``: a seed for what the other axes do, else nothing."""
    program = whole_program(name)
    if microbatches > 1:
        program = split_in_time(program, microbatches)
    parsed = parse_mesh(mesh)
    axis = [a.name for a in parsed.axes].index("pp")
    made = make_schedule(schedule, parsed.sizes[axis], microbatches, per_rank)
    forward = [n for n, node in enumerate(program.nodes) if node.phase == "forward"]
    draw = random.Random(seed)
    # not quite even, and anywhere
    cuts = tuple(forward[len(forward) * s // made.stages + draw.randint(-2, 2)] for s in range(1, made.stages))
    inner = Mesh(tuple(Axis(a.name, 1 if i == axis else a.size) for i, a in enumerate(parsed.axes)))
    if choices is None:
        whole = (Replicate(),) * len(parsed.axes)
        decisions = Decisions(
            inner, ((".",) * len(parsed.axes),) * len(program.nodes), (whole,) * len(program.inputs),
            (whole,) * len(program.outputs),
        )
    else:
        decisions = random_decisions(program, inner, random.Random(choices), sayable=True)

    def on_axis(row, nothing):
        return tuple(nothing if i == axis else x for i, x in enumerate(row))

    decisions = Decisions(
        parsed, tuple(on_axis(c, ".") for c in decisions.choices),
        tuple(on_axis(lay, Replicate()) for lay in decisions.inputs),
        tuple(on_axis(lay, Replicate()) for lay in decisions.outputs),
        pipeline=Pipeline(axis, cuts, made),
    )
    return Plan(program, decisions, "cpu", 0, NOTHING, (), Certificate("random", 0, 0, 1.0),
                Fingerprint("", "", "", "", ()))


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.01)


@functools.cache
def alone(name):
    """Losses, norms, first gradients and last parameters of one process."""
    model, (args, kwargs) = built(name), batch(name)
    program = whole_program(name)
    optimizer = optimizer_of(model.parameters())
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        if draws_random_numbers(program):
            values = input_values(program, model, args, kwargs, seed=step_seed(0, step))
            results = named_results(program, model, run_global(program, values))
            for key, parameter in model.named_parameters(remove_duplicate=False):
                parameter.grad = None if results.gradients[key] is None else results.gradients[key].clone()
            losses.append(float(results.loss))
        else:
            with computing_in(torch.float64):
                output = model(*args, **kwargs)
                judge = getattr(module_of(name), "loss", None)
                loss = judge(output, (args, kwargs)) if judge else output.loss if hasattr(output, "loss") else output
                loss.backward()
            losses.append(float(loss.detach()))
        if not step:
            first = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return losses, norms, first, {n: p.detach().clone() for n, p in model.named_parameters()}


def train_on_rank(plan, name):
    """The same on this rank of a plan; gradients and parameters whole."""
    model, (args, kwargs) = load(plan, built(name)), batch(name)
    runner = model._fxpar.runner
    places = {e.name: i for i, e in enumerate(plan.program.inputs) if e.kind == "parameter"}
    optimizer = optimizer_of(model.parameters())
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 2:
            loss = model(*args, **kwargs)
            loss = loss["loss"] if isinstance(loss, dict) else loss
            loss.backward()
            losses.append(float(loss.detach()))
        else:
            losses.append(float(model.step(*args, **kwargs)))
        if not step:
            first = {n: runner.whole(i, "gradient") for n, i in places.items()}
        norms.append(float(model.clip_grad_norm_(1.0)))
        optimizer.step()
    return losses, norms, first, {n: runner.whole(i) for n, i in places.items()}


def compare(got, want):
    """Losses, norms, gradients and parameters, to 1e-9 of the largest element of each."""
    for mine, theirs in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(got[2:], want[2:], strict=True):
        assert mine.keys() == theirs.keys()
        for key, tensor in theirs.items():
            if tensor is None:
                assert mine[key] is None or not mine[key].any(), key
            else:
                torch.testing.assert_close(mine[key], tensor, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


def run_plans(world, jobs, folder: Path, timeout=240):
    """Every (title, model name, plan) on ``world`` gloo ranks that are forks of this process; rank by rank compared
    with one process. The titles of those that failed, with what was said."""
    wants = {name: alone(name) for _, name, _ in jobs}
    folder.mkdir(exist_ok=True)

    def body():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        for title, name, plan in jobs:
            try:
                compare(train_on_rank(plan, name), wants[name])
            except Exception as error:
                raise AssertionError(f"{title}: {error}\n{traceback.format_exc()}") from error
            dist.barrier()

    end = forked_ranks(world, body, folder, timeout=timeout)
    return end
