"""A plan simulated again is what it was chosen by; its trace has every moment of it once."""

import functools
import json
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
import torch

from fxpar.captured import capture_program
from fxpar.cli.main import main
from fxpar.compile import compile_model
from fxpar.cost.cluster import parse_cluster
from fxpar.model_source import load_model_source
from fxpar.plans.codec import encode
from fxpar.plans.errors import FxparError
from fxpar.priced_problem import plan_cluster
from fxpar.progress import silent
from fxpar.simulate_plan import chrome_trace, simulate_plan

MODELS = Path(__file__).parent / "models"
ASKED = {
    "free": dict(mesh="2x2", cluster="2x2:h100"),
    "named": dict(mesh="dp=2,tp=2", cluster="2x2:l40s"),
    "microbatches": dict(mesh="2", cluster="1x2:a100", microbatches=2),
    "stages": dict(mesh="pp=2,dp=2", cluster="2x2:h100", microbatches=2, schedule="1f1b"),
}


@functools.cache
def plan_of(asked, name="gpt2"):
    torch.set_num_threads(1)
    source, options = load_model_source(str(MODELS / f"{name}.py")), ASKED[asked]
    captured = capture_program(source, outputs=("loss",), precision="fp32", progress=silent,
                               microbatches=options.get("microbatches", 1))
    return compile_model(source, captured=captured, **options).plan


@pytest.mark.parametrize("asked", ASKED)
def test_on_its_own_cluster_it_takes_what_the_plan_says(asked):
    plan = plan_of(asked)
    found = simulate_plan(plan, plan_cluster(plan))
    expected = plan.prediction
    assert (found.step_ns, found.compute_ns, found.communication_ns, found.exposed_ns) == (
        expected.step_ns, expected.compute_ns, expected.communication_ns, expected.exposed_ns)
    assert found.peak_bytes == expected.peak_bytes
    assert (found.bubble is not None) == (asked == "stages")
    assert "+0.0% of" in found.text(expected.step_ns)


@pytest.mark.parametrize("asked", ASKED)
def test_the_trace_has_every_moment_once(asked):
    plan = plan_of(asked)
    found = simulate_plan(plan, plan_cluster(plan))
    lanes = defaultdict(list)
    for event in found.events:
        lanes[event.rank, event.stream].append(event)
    assert lanes
    for events in lanes.values():
        events.sort(key=lambda e: e.begin_ns)
        assert all(a.begin_ns + a.ns <= b.begin_ns for a, b in zip(events, events[1:], strict=False))
    assert max(e.begin_ns + e.ns for e in found.events) <= found.step_ns
    if asked != "stages":
        assert sum(e.ns for e in lanes[0, "compute"]) == found.compute_ns
        assert sum(e.ns for e in lanes[0, "link"]) == found.communication_ns
        assert any(e.module for e in found.events)
    else:
        assert {e.rank for e in found.events} == {0, 1}
    assert sum(r.waited_ns for r in found.regions) <= found.exposed_ns
    trace = json.loads(json.dumps(chrome_trace(plan, found)))
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == len(found.events)


def test_a_faster_machine_computes_faster_and_another_number_of_devices_is_refused():
    plan = plan_of("free")
    own = plan_cluster(plan)
    device = own.device
    twice = msgspec.structs.replace(device, peak_flops={k: 2 * v for k, v in device.peak_flops.items()},
                                    memory_bandwidth=2 * device.memory_bandwidth)
    faster = simulate_plan(plan, msgspec.structs.replace(own, device=twice))
    assert faster.compute_ns < simulate_plan(plan, own).compute_ns
    with pytest.raises(FxparError, match="is for 4 devices") as caught:
        simulate_plan(plan, parse_cluster("2x4:h100"))
    assert caught.value.numbers and caught.value.way_out


def test_on_the_command_line(tmp_path, capsys):
    plan = plan_of("free")
    (tmp_path / "plan").write_bytes(encode(plan))
    assert main(["simulate", str(tmp_path / "plan"), "--trace", str(tmp_path / "t.json"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step_ns"] == plan.prediction.step_ns and "events" not in facts
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert main(["simulate", str(tmp_path / "plan"), "--cluster", "2x2:a100"]) == 0
    assert "2x2:a100" in capsys.readouterr().out
    assert main(["simulate", str(tmp_path / "plan"), "--trace", str(tmp_path / "no" / "t.json")]) == 1
    assert "--trace" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "plan"), "--cluster", "8:h100"]) == 1
