"""How long the ranks of a pipeline wait, measured on gloo ranks, is what the simulator says of the same schedule.

The toy computes much and sends little. How long each action took is measured on its rank, how long its messages take is
measured between the ranks; the simulator walks through the schedule with these times and must come to the step and the
waiting that the clock shows. What a machine with other work to do takes longer for counts on both sides.

Two of the schedules run in CI, all of them with ``-m slow``.
"""

import json
import statistics
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.plans.schedule import leaves_of, rank_of_stage
from fxpar.runtime.model import load
from fxpar.schedules import SCHEDULES
from fxpar.simulate_stages import walk_actions
from fxpar.timeline import Timeline
from tools.forked_ranks import forked_ranks

RANKS, STEPS, TRIES = 2, 5, 3
TOLERANCE = 0.15
SMALL = 0.1
"""Shares of a step below this one are judged as it is: how fast a waiting rank wakes is the machine's doing."""
ROWS, WIDTH, INNER, LAYERS = 256, 256, 4096, 4
TOY = f"""
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear({WIDTH}, {INNER}), nn.Linear({INNER}, {WIDTH})

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

def build():
    return nn.Sequential(*(Block() for _ in range({LAYERS})))

def example_inputs():
    return (torch.randn({{rows}}, {WIDTH}),), {{{{}}}}

def loss(output, inputs):
    return output.square().mean()
"""
KINDS = {"forward": "F", "backward": "B", "backward_inputs": "I", "backward_weights": "W"}


def plan_of(schedule, microbatches, folder):
    """(source, plan) of the toy, cut into stages as ``fxpar compile`` cuts it."""
    file = folder / f"toy{microbatches}.py"
    file.write_text(TOY.format(rows=ROWS * microbatches))
    source = load_model_source(str(file))
    return source, compile_model(source, mesh=f"pp={RANKS}", schedule=schedule, microbatches=microbatches).plan


def watch(stage, events):
    """Note when a stage's computations end, (stage, kind, microbatch, time), and when it waited, (begin, end)."""
    def ending(run, kind, of_one):
        def call(*args, **kwargs):
            results = run(*args, **kwargs)
            events.append((stage.index, kind, args[0] if of_one else -1, time.monotonic_ns()))
            return results
        return call

    def waiting(kind, microbatch, take=stage.take):
        begin = time.monotonic_ns()
        results = take(kind, microbatch)
        events.append((begin, time.monotonic_ns()))
        return results

    for name, kind in KINDS.items():
        setattr(stage.body, name, ending(getattr(stage.body, name), kind, True))
    stage.body.finish = ending(stage.body.finish, "REDUCE_GRAD", False)
    stage.take = waiting


def message_ns(rank):
    """What a message of the toy takes from one rank to the other: half of the way there and back."""
    tensor, halves = torch.zeros(ROWS, WIDTH), []
    for _ in range(9):
        begin = time.monotonic_ns()
        for sender in (0, 1):
            if rank == sender:
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(tensor, 1 - rank)
        halves.append((time.monotonic_ns() - begin) // 2)
    return int(statistics.median(halves))


def measure(source, plan, folder):
    """Per step the events of all ranks, and the time of a message."""
    def body():
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        rank = dist.get_rank()
        torch.manual_seed(0)
        model, (args, _), steps, events = load(plan, source.build()), source.example_inputs(), [], []
        for one in model._fxpar.runner.torch_stages:
            watch(one, events)
        for _ in range(STEPS + 1):
            events.clear()
            model.zero_grad()
            message = message_ns(rank)
            dist.barrier()
            events.append((time.monotonic_ns(),) * 2)
            model.step(*args)
            steps.append((message, list(events)))
        (folder / f"events{rank}.json").write_text(json.dumps(steps[1:]))
        dist.barrier()

    folder.mkdir()
    end = forked_ranks(RANKS, body, folder, timeout=120)
    assert end.failures == (), end.failures[0][-3000:]
    rows = [json.loads((folder / f"events{rank}.json").read_text()) for rank in range(RANKS)]
    return [(max(m for m, _ in step), [events for _, events in step]) for step in zip(*rows, strict=True)]


def taken_apart(events):
    """What each action took, from the end of the one before, waiting left out, of a rank's events."""
    took, last, waited = {}, events[0][1], 0
    for event in events[1:]:
        if len(event) == 2:
            waited += event[1] - event[0]
        else:
            took[tuple(event[:3])] = event[3] - last - waited
            last, waited = event[3], 0
    return took


def errors(schedule, message, rows):
    """By how much of it the simulator, given what the actions took, is wrong about a step: its time, the share of it in
    which the busiest rank waits (the bubble), and that in which all of them do."""
    parts = [taken_apart(events) for events in rows]
    computing = {*KINDS.values(), "REDUCE_GRAD"}
    for took, row in zip(parts, leaves_of(schedule), strict=True):
        assert list(took) == [(a.stage, a.kind, a.microbatch) for a in row if a.kind in computing]
    places = rank_of_stage(schedule)

    def timeline(action):
        ns = parts[places[action.stage]].get((action.stage, action.kind, action.microbatch))
        return None if ns is None else Timeline(ns, ns, 0, ())

    walk = walk_actions(schedule, timeline, lambda _: message)
    step = max(events[-1][-1] for events in rows) - min(events[0][0] for events in rows)
    said, seen = (
        (ns, 1 - max(walk.compute) / ns, 1 - sum(walk.compute) / (RANKS * ns)) for ns in (walk.step_ns, step)
    )
    assert said[1] == pytest.approx(walk.bubble)
    return [abs(b - a) / max(a, SMALL) for a, b in zip(said, seen, strict=True)]


def check(schedule, microbatches, folder):
    """The median step is as the simulator says, at the latest in the last try."""
    source, plan = plan_of(schedule, microbatches, folder)
    tries = []
    while len(tries) < TRIES and not (tries and max(tries[-1]) <= TOLERANCE):
        steps = [errors(plan.decisions.pipeline.schedule, *step)
                 for step in measure(source, plan, folder / f"try{len(tries)}")]
        tries.append([statistics.median(one) for one in zip(*steps, strict=True)])
    assert max(tries[-1]) <= TOLERANCE, tries


@pytest.mark.slow  # it measures time: other tests beside it would be measured, too
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedules_bubble_is_the_predicted_one(schedule, microbatches, tmp_path):
    check(schedule, microbatches, tmp_path)
