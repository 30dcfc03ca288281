"""What the plan leaves of a device's memory is subtracted before anything is searched, recorded and shown."""

import json

import pytest

from fxpar.cli.main import main
from fxpar.compile import budget_of, compile_model
from fxpar.cost.cluster import parse_cluster
from fxpar.plans.codec import decode, encode
from fxpar.plans.errors import FxparError
from fxpar.show import plan_facts, plan_text
from tests.compiled import captured

GIB = 2**30
MIB = 2**20


def test_the_cluster_says_what_is_reserved_unless_the_user_does():
    gpu = parse_cluster("1x2:h100")
    whole = gpu.device.memory_bytes
    assert gpu.reserve_bytes == 5 * GIB // 2
    assert budget_of(gpu, None, None) == (gpu.usable_bytes, gpu.reserve_bytes)
    assert budget_of(gpu, None, 0) == (whole, 0)
    assert budget_of(gpu, None, 4 * GIB) == (whole - 4 * GIB, 4 * GIB)
    assert budget_of(gpu, 60 * GIB, None) == (60 * GIB, 0)
    assert budget_of(gpu, 60 * GIB, GIB) == (59 * GIB, GIB)
    with pytest.raises(FxparError, match="nothing is left of 1.00 GiB per device when 2.00 GiB are reserved"):
        budget_of(gpu, GIB, 2 * GIB)


def test_it_is_recorded_and_shown():
    taken, source = captured("mlp")
    plan = compile_model(source, cluster="1x2:a100", mesh="dp=2", reserve=3 * GIB, captured=taken).plan
    assert plan.reserve_bytes == 3 * GIB
    assert plan.memory_bytes == parse_cluster("1x2:a100").device.memory_bytes - 3 * GIB
    assert decode(encode(plan)) == plan
    assert "3.00 GiB more are reserved" in plan_text(plan) and plan_facts(plan)["reserve_bytes"] == 3 * GIB
    none = compile_model(source, mesh="dp=2", memory=64 * MIB, captured=taken).plan
    assert none.reserve_bytes == 0 and none.memory_bytes == 64 * MIB and "reserved" not in plan_text(none)


def test_the_command_takes_it(tmp_path, capsys):
    model = tmp_path / "model.py"
    model.write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(8, 8)\n\n\n"
                     "def example_inputs():\n    return (torch.ones(4, 8),), {}\n\n\n"
                     "def loss(output, inputs):\n    return output.mean()\n")
    command = ["compile", str(model), "-o", str(tmp_path / "plan"), "--mesh", "2", "--memory", "64MiB", "--json"]
    assert main([*command, "--reserve", "16MiB"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["memory_bytes"], facts["reserve_bytes"]) == (48 * MIB, 16 * MIB)
    assert main([*command, "--reserve", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"] == 64 * MIB
    assert main([*command, "--reserve", "64MiB"]) != 0
    error = capsys.readouterr().err
    assert "nothing is left of 64.0 MiB per device when 64.0 MiB are reserved" in error and "--reserve" in error
