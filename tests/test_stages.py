"""Programs cut into stages anywhere: run stage by stage they are the whole program, to the bit.

Only the gradient of a parameter that several stages read is added up in another order (embedding and head)."""

import functools
import importlib
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxpar.capture import capture
from fxpar.hubs import insert_hubs
from fxpar.plans.check import program_problems
from fxpar.plans.errors import PlanFileError
from fxpar.plans.stages import FREE, cut_problems, cut_stages, stage_at
from fxpar.runtime.interpret import run_global
from fxpar.step_values import input_values
from tests.stage_steps import nodes_read, run_stages

MODELS = ("gpt2", "llama", "bert", "t5", "unet", "vit")
OTHERS = ("bert_dropout", "causal", "mixtral", "resnet", "swin", "whisper", "dlrm", "encoder", "normed", "lstm_ctc")


@functools.cache
def captured(name):
    torch.set_num_threads(1)
    module = importlib.import_module(f"tests.models.{name}")
    torch.manual_seed(0)
    model = module.build()
    args, kwargs = module.example_inputs()
    loss = getattr(module, "loss", None)
    program = insert_hubs(capture(model, args, kwargs, **({"loss": loss} if loss else {})))
    values = input_values(program, model, args, kwargs, seed=3)
    return program, values, [t.clone() for t in run_global(program, values)]


def forward_count(program):
    return sum(node.phase == "forward" for node in program.nodes)


def check_structure(program, cut):
    """What goes in is made somewhere, what goes out is read or leaves, parameters are owned once."""
    for stage, after in zip(cut.stages, cut.stages[1:], strict=False):
        for out, come in ((stage.sent, after.received), ):
            assert [stage.values[stage.program.outputs[o].value] for o in out] == [
                after.values[after.program.inputs[i].value] for i in come]
        assert [after.values[after.program.outputs[o].value] for o in after.gradients_sent] == [
            stage.values[stage.program.inputs[i].value] for i in stage.gradients_received]
    for number, stage in enumerate(cut.stages):
        problems = [p for p in program_problems(stage.program) if "loss" not in p]
        assert problems == []
        read = nodes_read(stage.program)
        for entry, position in zip(stage.program.inputs, stage.inputs, strict=True):
            held = position >= 0 and (cut.owners[position] == number or number in cut.parts[position])
            assert entry.value in read or held
        for output in stage.program.outputs:
            if output.kind == "gradient":
                owner = [e.name for e in program.inputs].index(output.name)
                assert number in cut.parts[owner] and cut.owners[owner] == cut.parts[owner][0]
    ran = sorted(n for stage in cut.stages for n in stage.nodes if cut.stage_of[n] != FREE)
    assert ran == sorted(n for n, s in enumerate(cut.stage_of) if s != FREE)  # each once


def check_cut(name, stages, count):
    program, values, want = captured(name)
    cut = cut_stages(program, stages, count)
    check_structure(program, cut)
    parts = {e.name: len(p) for e, p in zip(program.inputs, cut.parts, strict=True) if e.kind == "parameter"}
    for output, got, one in zip(program.outputs, run_stages(program, cut, values), want, strict=True):
        if output.kind == "gradient" and parts[output.name] > 1:
            torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-7)  # added up in another order
        else:
            assert torch.equal(got, one), (name, output)
    return cut


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_stages_are_the_program_to_the_bit(name, data):
    program = captured(name)[0]
    last = forward_count(program) - 1
    cuts = sorted(data.draw(st.sets(st.integers(1, last), min_size=1, max_size=5)))
    assert not list(cut_problems(program, cuts))
    check_cut(name, stage_at(program, cuts), len(cuts) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_stages_of_every_model(name):
    """60 draws, up to 8 stages: ``pytest tests/test_stages.py -m slow``."""
    program, draw = captured(name)[0], random.Random(0)
    for _ in range(60):
        cuts = sorted(draw.sample(range(1, forward_count(program)), draw.randint(1, 7)))
        check_cut(name, stage_at(program, cuts), len(cuts) + 1)


def layer_cuts(program, *names):
    """Before the first forward op of each of the modules."""
    return [next(n for n, node in enumerate(program.nodes) if node.module.startswith(name)) for name in names]


@pytest.mark.parametrize(
    ("name", "before", "sent", "gradients"),
    [
        ("gpt2", ("transformer.h.1.ln_1", "transformer.ln_f"), [1, 1, 0], [0, 1, 1]),
        ("llama", ("model.layers.1.input_layernorm",), [1, 0], [0, 1]),
        ("bert", ("bert.encoder.layer.1.attention",), [1, 0], [0, 1]),
        # the position bias of the encoder's layers, then what the decoder's layers all read, carried past one
        ("t5", ("encoder.block.1", "decoder.block.1"), [2, 3, 0], [0, 2, 3]),
    ],
)
def test_between_layers_little_goes_over(name, before, sent, gradients):
    """One value between layers, and one gradient; embedding and head of a tied weight each have their part."""
    program = captured(name)[0]
    cuts = layer_cuts(program, *before)
    cut = check_cut(name, stage_at(program, cuts), len(cuts) + 1)
    assert [len(s.sent) for s in cut.stages] == sent
    assert [len(s.gradients_sent) for s in cut.stages] == gradients
    tied = {e.name: p for e, p in zip(program.inputs, cut.parts, strict=True) if len(p) > 1}
    if name == "gpt2":
        assert tied == {"transformer.wte.weight": (0, 2)}


def test_values_only_go_forward():
    program = captured("vit")[0]
    stages = list(stage_at(program, [forward_count(program) // 2]))
    stages = [1 - s for s in stages]
    with pytest.raises(PlanFileError) as error:
        cut_stages(program, stages, 2)
    assert "reads what stage 1 makes" in str(error.value)
    with pytest.raises(PlanFileError):
        cut_stages(program, [2] * len(stages), 2)
    for cuts in ([0], [5, 5], [7, 3], [len(program.nodes)]):
        assert list(cut_problems(program, cuts))
