"""Compiled plans with stages: what is asked for is there, cuts are even, and what a step takes is what formulas say."""

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fxpar.captured import capture_program
from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.plans.check import plan_problems
from fxpar.plans.codec import decode, encode
from fxpar.plans.errors import FxparError, Infeasible, PlanFileError
from fxpar.plans.schedule import Schedule, rank_of_stage
from fxpar.plans.text import canonical_text
from fxpar.progress import silent
from fxpar.recompute import layer_of
from fxpar.schedules import SCHEDULES, make_schedule
from fxpar.show import plan_text
from fxpar.simulate import Static
from fxpar.simulate_stages import StageCost, walk_schedule
from fxpar.stage_cuts import best_cuts
from fxpar.stage_memory import StageMemory
from fxpar.timeline import Timeline

MODELS = Path(__file__).parent / "models"


@functools.cache
def source(name="gpt2"):
    torch.set_num_threads(1)
    return load_model_source(str(MODELS / f"{name}.py"))


@functools.cache
def taken(count):
    return capture_program(source(), outputs=("loss",), precision="fp32", progress=silent, microbatches=count)


def compiled(count, **options):
    return compile_model(source(), captured=taken(count), microbatches=count, **options).plan


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_with_every_schedule(schedule):
    count = 6 if schedule == "dualpipev" else 2
    plan = compiled(count, mesh="pp=2,dp=2" if schedule != "zbv" else "pp=2", schedule=schedule)
    assert list(plan_problems(plan)) == []
    assert decode(encode(plan)) == plan
    pipeline = plan.decisions.pipeline
    assert pipeline.schedule == make_schedule(schedule, 2, count)
    assert len(pipeline.cuts) == pipeline.schedule.stages - 1
    assert f"schedule '{schedule}' of {count} microbatches" in canonical_text(plan)
    assert f"; {schedule}, {count} microbatches; ranks wait" in plan_text(plan)
    assert plan.prediction.step_ns >= plan.prediction.compute_ns > 0


def test_two_stages_are_cut_between_layers():
    plan = compiled(2, mesh="dp=2,pp=2")
    (cut,) = plan.decisions.pipeline.cuts
    before, after = (layer_of(plan.program.nodes[n].module) for n in (cut - 1, cut))
    assert (before, after) == ("transformer.h.0", "transformer.h.1")
    assert all(choice[1] == "." for choice in plan.decisions.choices)
    assert any(choice[0] != "." for choice in plan.decisions.choices)  # dp splits the batch


def test_stages_that_do_not_fit_a_plan_are_refused_when_it_is_read():
    plan = compiled(2, mesh="pp=2")
    decisions, pipeline = plan.decisions, plan.decisions.pipeline
    last = len(plan.program.nodes) - 1
    schedule = pipeline.schedule
    swapped = tuple(reversed(schedule.ranks[0]))
    for changes, says in [
        ({"axis": 1}, "the schedule is of 2 ranks"),
        ({"axis": -1}, "the schedule is of 2 ranks"),
        ({"cuts": (last,)}, "stages are cut before nodes"),
        ({"cuts": (0,)}, "stages are cut before nodes"),
        ({"cuts": ()}, "the schedule is of 2 stages and 2 microbatches, the program of 1 and 2"),
        ({"schedule": make_schedule("1f1b", 2, 3)}, "2 stages and 3 microbatches, the program of 2 and 2"),
        ({"schedule": replace(schedule, ranks=(swapped, schedule.ranks[1]))}, "comes before what it needs"),
        ({"schedule": replace(schedule, ranks=(("0X0",), schedule.ranks[1]))}, "is not an action"),
    ]:
        broken = replace(plan, decisions=replace(decisions, pipeline=replace(pipeline, **changes)))
        assert any(says in problem for problem in plan_problems(broken)), says
        with pytest.raises(PlanFileError):
            decode(encode(broken))
    busy = replace(decisions, choices=(("f0",), *decisions.choices[1:]))
    assert any("which is that of the stages" in p for p in plan_problems(replace(plan, decisions=busy)))


def test_what_is_asked_for_without_stages_or_wrongly_is_refused():
    for options, says in [
        ({"mesh": "dp=2", "schedule": "1f1b"}, "--schedule is for plans with stages"),
        ({"mesh": "2", "per_rank": 2}, "--stages-per-rank is for plans with stages"),
        ({"mesh": "pp=2", "schedule": "none"}, "there is no schedule 'none'"),
        ({"mesh": "pp=2", "schedule": "1f1b", "per_rank": 2}, "has 1 stage per rank, not 2"),
        ({"mesh": "pp=2", "schedule": "dualpipev"}, "there is no schedule dualpipev of 2 ranks, 4 stages and 2"),
        ({"mesh": "pp=500"}, "500 stages cannot be cut"),
    ]:
        with pytest.raises(FxparError) as error:
            compiled(2, **options)
        assert says in str(error.value) and error.value.way_out, says


def test_a_stage_that_does_not_fit_is_refused_with_its_numbers():
    need = compiled(2, mesh="pp=2").prediction.peak_bytes
    assert compiled(2, mesh="pp=2", memory=need).prediction.peak_bytes == need
    with pytest.raises(Infeasible) as error:
        compiled(2, mesh="pp=2", memory=need - 64 * 1024)
    assert "--microbatches" in str(error.value)


def test_more_microbatches_hold_less_and_gpipe_more_than_1f1b():
    def activations(schedule, count):
        return compiled(count, mesh="pp=2", schedule=schedule).prediction.activation_bytes

    assert activations("1f1b", 6) < min(activations("1f1b", 2), activations("gpipe", 6))


@given(st.lists(st.integers(0, 20), min_size=2, max_size=9), st.integers(1, 4))
def test_best_cuts_are_the_best(weights, stages):
    if stages > len(weights):
        stages = len(weights)
    before = list(itertools.accumulate(weights))[:-1]
    whole, places = sum(weights), list(range(1, len(weights)))

    def heaviest(cuts):
        return max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))

    found = best_cuts(before, whole, places, stages)
    assert len(found) == stages - 1 and list(found) == sorted(set(found))
    assert heaviest(found) == min(heaviest(c) for c in itertools.combinations(places, stages - 1))


def costs(stages, forward, inputs, weights, sent=0):
    def time(ns):
        return Timeline(ns, ns, 0, ())

    memory = StageMemory(Static(0, 0, 0), (), 0, 0, 1, 1, (), sent, sent, 0)
    return [StageCost(time(0), time(forward), time(inputs + weights), time(inputs), time(weights), time(0),
                      memory)] * stages


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_equal_stages_take_what_the_formula_says(ranks, count, forward, inputs, weights):
    """(M + S - 1) (F + B) for GPipe and 1F1B; a backward in two parts is never slower, and waits less."""
    one = forward + inputs + weights
    for name in ("gpipe", "1f1b"):
        walk = walk_schedule(make_schedule(name, ranks, count), costs(ranks, forward, inputs, weights), lambda _: 0)
        assert walk.step_ns == (count + ranks - 1) * one
        assert walk.compute == (count * one,) * ranks
        assert abs(walk.bubble - (ranks - 1) / (count + ranks - 1)) < 1e-9
    if count % max(1, count // ranks) == 0:
        split = make_schedule("zero-bubble", ranks, count, 1)
        walk = walk_schedule(split, costs(ranks, forward, inputs, weights), lambda _: 0)
        assert walk.step_ns <= (count + ranks - 1) * one


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 20))
def test_every_action_is_walked_and_sends_take_time(name, ranks, send):
    schedule = make_schedule(name, ranks, 8)
    stages = schedule.stages
    near, far = (walk_schedule(schedule, costs(stages, 3, 2, 1), lambda _, t=t: t) for t in (0, send))
    places = rank_of_stage(schedule)
    assert near.compute == tuple(8 * 6 * places.count(r) for r in range(ranks))
    assert far.step_ns >= near.step_ns + (2 * send * (ranks - 1) if ranks > 1 else 0)


def test_a_message_leaves_when_both_ranks_have_got_to_it():
    """Stage 1 asks for microbatch 1 before it runs microbatch 0, or after; sends late or early."""
    def ends(first, second):
        return walk_schedule(Schedule("made", 2, 2, (tuple(first.split()), tuple(second.split()))),
                             costs(2, 3, 2, 1, 1), lambda _: 5).ends

    down = "0F0 0SEND_F0 0F1 0SEND_F1"
    up = " 1SEND_B0 1SEND_B1"
    back = " 0RECV_B0 0RECV_B1 0B0 0B1"
    # microbatch 0 is there at 8, runs to 11; microbatch 1 is there at 11, or leaves at 11 and is there at 16
    assert ends(down + back, "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1" + up) == (31, 20)
    assert ends(down + back, "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1B1" + up) == (36, 25)
    # sent after both
    assert ends("0F0 0F1 0SEND_F0 0SEND_F1" + back, "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1" + up)[1] == 23


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), [
    ("gpt2", ["--mesh", "pp=2,dp=2", "--schedule", "1f1b", "--microbatches", "2"]),
    ("t5", ["--mesh", "pp=2,tp=2", "--schedule", "zbv", "--microbatches", "3"]),
    ("unet", ["--mesh", "dp=2,pp=2", "--schedule", "interleaved", "--microbatches", "2"]),
    ("llama", ["--mesh", "pp=2,dp=2,tp=2", "--schedule", "zero-bubble", "--microbatches", "3"]),
])
def test_the_two_commands(model, options, tmp_path):
    """``fxpar compile`` and ``fxpar verify --ranks gloo``."""
    file, plan = str(MODELS / f"{model}.py"), str(tmp_path / "plan.msgpack")
    for command in (["compile", file, "-o", plan, *options], ["verify", plan, file, "--ranks", "gloo", "--json"]):
        done = subprocess.run([sys.executable, "-m", "fxpar", *command], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"]


def test_more_stages_than_modules_with_parameters_are_refused(tmp_path):
    model = tmp_path / "one.py"
    model.write_text(
        "import torch\n"
        "def build():\n    return torch.nn.Sequential(torch.nn.Linear(5, 3))\n"
        "def example_inputs():\n    return (torch.ones(4, 5),), {}\n"
        "def loss(output, inputs):\n    return output.square().sum()\n"
    )
    done = subprocess.run([sys.executable, "-m", "fxpar", "compile", str(model), "--mesh", "pp=4", "-o",
                           str(tmp_path / "plan")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "4 stages cannot be cut" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "plan").exists()
