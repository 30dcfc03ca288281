"""Microbatches: whatever is decided and however often the batch is cut, a step is that of the whole batch; what cannot
be is refused by its line."""

import hashlib
import re
import tempfile
from functools import cache
from pathlib import Path

import msgpack
import msgspec
import pytest
import torch

from fxpar.capture.retype import ALL_DOUBLE, retype
from fxpar.captured import capture_program
from fxpar.check import check_plan_with_model
from fxpar.compile import compile_model
from fxpar.microbatches import split_in_time
from fxpar.model_source import load_model_source
from fxpar.plans.codec import decode, encode
from fxpar.plans.errors import FxparError, UnsupportedError
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.program import Program
from fxpar.progress import silent
from fxpar.random_plan import random_decisions
from fxpar.reference import EagerStep, built, widen
from fxpar.runtime.interpret import run_global
from fxpar.runtime.local import AddStep, collectives
from fxpar.runtime.rewrite.microbatches import pieces
from fxpar.runtime.virtual import run_virtual
from fxpar.step_values import draws_random_numbers, input_values
from fxpar.verify import MEMORY_TOLERANCE, verify_plan
from tests.virtual_memory import virtual_peaks

torch.set_num_threads(1)
FOLDER = Path(__file__).parent
SEED = 5


@cache
def source_of(model: str, batch: int = 6):
    """A model of tests/models, its batch as large as is asked for."""
    path = FOLDER / "models" / f"{model}.py"
    source = load_model_source(str(path))
    if batch == 6:
        return source
    if model == "bert_dropout":
        path = FOLDER / "models" / "bert.py"
    text = re.sub(r"(?m)^(.*BATCH.* = (?:\d+, )?)6\b", rf"\g<1>{batch}", path.read_text())
    if model == "bert_dropout":
        text = text.replace("dropout: float = 0.0", "dropout: float = 0.2")
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(text)
    source = load_model_source(file.name)
    assert all(t.shape[0] == batch for t in source.example_inputs()[1].values())
    return source


@cache
def captured(model: str, batch: int = 6):
    return capture_program(source_of(model, batch), outputs=("loss",), precision="fp32", progress=silent)


@cache
def reference(model: str, batch: int = 6):
    """What the whole program computes in double, by value id of its outputs in order, and the model."""
    program = retype(captured(model, batch)[0], ALL_DOUBLE)
    source = source_of(model, batch)
    module = built(source, torch.float64)
    args, kwargs = widen(source.example_inputs(), torch.float64)
    wanted = run_global(program, input_values(program, module, args, kwargs, seed=SEED))
    if not draws_random_numbers(program):
        eager = EagerStep(source, built(source, torch.float64), torch.float64)()
        for output, tensor in zip(program.outputs, wanted, strict=True):
            other = eager.loss if output.kind == "loss" else eager.gradients.get(output.name)
            if output.kind in ("loss", "gradient"):
                torch.testing.assert_close(tensor, other, rtol=1e-9, atol=1e-12)
    return wanted


def inputs(program: Program, model: str, batch: int):
    source = source_of(model, batch)
    args, kwargs = widen(source.example_inputs(), torch.float64)
    return input_values(program, built(source, torch.float64), args, kwargs, seed=SEED)


def agree(model: str, count: int, mesh: str, seed: int, batch: int = 6) -> None:
    program = split_in_time(captured(model, batch)[0], count)
    assert program.microbatches == count
    decisions = random_decisions(program, parse_mesh(mesh), seed)
    double = retype(program, ALL_DOUBLE)
    result = run_virtual(double, decisions, inputs(double, model, batch))
    norms = [0.0, 0.0]
    for output, got, want in zip(program.outputs, result.outputs, reference(model, batch), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda t, o=output: f"{o.kind} {o.name}: {t}")
        if output.kind == "gradient":
            norms = [n + float(t.square().sum()) for n, t in zip(norms, (got, want), strict=True)]
    assert max(result.disagreement) == 0.0 and norms[0] == pytest.approx(norms[1], rel=1e-9)


FAST = [("bert_dropout", 2, "2x2", 1), ("gpt2", 3, "2", 2), ("llama", 6, "2", 3), ("t5", 2, "2", 4),
        ("vit", 3, "2x2", 5), ("encoder", 2, "1", 6)]  # fmt: skip


@pytest.mark.parametrize("case", FAST, ids=str)
def test_any_decisions_compute_the_whole_batch(case):
    agree(*case)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "bert_dropout", "gpt2", "llama", "t5", "vit", "encoder"])
@pytest.mark.parametrize("mesh", ["1", "2", "2x2"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_any_decisions_compute_the_whole_batch_of_eight(model, mesh, count):
    batch = 8 if model != "encoder" else 6
    for seed in range(2):
        agree(model, count if batch == 8 else {2: 2, 4: 3, 8: 6}[count], mesh, seed, batch)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_dropout_masks_are_those_of_the_whole_batch_to_the_bit(count):
    whole = captured("bert_dropout")[0]

    def masks(program: Program, mesh: str) -> list[list[torch.Tensor]]:
        double = retype(program, ALL_DOUBLE)
        values = {n.outputs[1]: [] for n in program.nodes if n.op == "fxpar.dropout.default" and n.phase == "forward"}
        decisions = msgspec.structs.replace(random_decisions(program, parse_mesh(mesh), 3), recompute=())

        def watch(value: int, tensor: torch.Tensor) -> None:
            # a reshard makes the same value again
            if value in values and not any(torch.equal(tensor, other) for other in values[value][-1:]):
                values[value].append(tensor)

        run_virtual(double, decisions, inputs(double, "bert_dropout", 6), watch)
        return list(values.values())

    for want, got in zip(masks(whole, "1"), masks(split_in_time(whole, count), "2"), strict=True):
        assert len(want) == 1 and torch.equal(want[0], torch.cat(got))


@pytest.mark.parametrize(("model", "line"), [
    ("resnet", "module resnet.embedder.embedder.normalization"), ("mixtral", "load_balancing_loss_func")])
def test_what_needs_the_whole_batch_is_refused_by_its_line(model, line):
    with pytest.raises(UnsupportedError, match="2 microbatches would change the result") as error:
        compile_model(source_of(model), mesh="2", microbatches=2, captured=captured(model))
    assert line in error.value.where and ".py:" in error.value.where
    assert any("a sum over microbatches" in text for text in error.value.numbers)
    assert "--microbatch-semantics accumulate" in error.value.way_out


@pytest.mark.parametrize("model", ["resnet", pytest.param("mixtral", marks=pytest.mark.slow), "bert_dropout"])
def test_accumulation_is_a_batch_of_its_own_in_each_microbatch(model):
    source = source_of(model)
    plan = compile_model(source, mesh="2", microbatches=2, semantics="accumulate", random_choices=4,
                         captured=captured(model)).plan
    assert "not those of the whole batch" in dict(plan.provenance)["microbatches"]
    report = verify_plan(decode(encode(plan)), source)
    assert report.ok, report.text()


@pytest.mark.parametrize(("count", "words"), [(4, "a batch of 6 does not divide into 4"), (5, "6 = 1 x 5 [+] 1")])
def test_a_batch_that_does_not_divide_is_refused(count, words):
    for semantics in ("exact", "accumulate"):
        with pytest.raises(FxparError, match=words) as error:
            compile_model(source_of("vit"), mesh="2", microbatches=count, semantics=semantics, captured=captured("vit"))
        assert "divides 6" in error.value.way_out


def plan_of(zero):
    return compile_model(source_of("vit"), mesh="dp=2", microbatches=2, zero=zero, captured=captured("vit")).plan


@pytest.mark.parametrize("zero", [None, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_chosen_plan_says_and_does_when_gradients_are_reduced(zero):
    plan = plan_of(zero)
    parts = pieces(plan.program, plan.decisions, (1,))
    sums = [len([c for c in collectives(p) if c.kind in ("all_reduce", "reduce_scatter")]) for p in parts.programs]
    gathers = [len([c for c in collectives(p) if c.kind == "all_gather"]) for p in parts.programs]
    if zero is None:
        assert sums[2] == 0 and sums[3] > 0 and not plan.decisions.reduce_each
    else:
        assert sums[2] > 0 and sums[3] == 0
        gradients = {i for i, o in enumerate(plan.program.outputs) if o.kind == "gradient"}
        assert set(plan.decisions.reduce_each) == gradients
    if zero == 2:
        assert gathers[0] > 0 and gathers[1] == gathers[2] == 0
    if zero == 3:
        assert gathers[0] == 0 and gathers[1] > 0
    assert sum(isinstance(s, AddStep) for s in parts.backward.steps) == len(parts.totals) > 0
    assert verify_plan(plan, source_of("vit")).ok
    report = check_plan_with_model(plan, source_of("vit"), certificate=True)
    assert report.ok, report.text()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_memory_of_microbatches_is_what_ranks_hold(seed):
    source = source_of("vit")
    asked = {"zero": 2, "mesh": "dp=2"} if seed == 0 else {"random_choices": seed, "mesh": "2x2"}
    plan = compile_model(source, microbatches=3, captured=captured("vit"), **asked).plan
    args, kwargs = source.example_inputs()
    values = input_values(plan.program, built(source, torch.float32), args, kwargs, seed=0)
    held = max(virtual_peaks(plan.program, plan.decisions, values)) + plan.prediction.optimizer_bytes
    assert abs(plan.prediction.peak_bytes - held) <= MEMORY_TOLERANCE * held


def test_more_microbatches_hold_fewer_activations_and_take_longer():
    source = source_of("vit")
    predicted = [compile_model(source, mesh="dp=2", microbatches=m, captured=captured("vit")).plan.prediction
                 for m in (1, 3)]
    assert predicted[1].activation_bytes < predicted[0].activation_bytes
    assert predicted[1].step_ns > predicted[0].step_ns


def test_an_older_plan_loads():
    plan = compile_model(source_of("vit"), mesh="2", random_choices=0, captured=captured("vit")).plan
    magic, _, _, payload = msgpack.unpackb(encode(plan))
    raw = msgpack.unpackb(payload)
    for field in ("time", "reduce_each", "held"):
        del raw[field]
    payload = msgpack.packb(raw, use_bin_type=True)
    old = msgpack.packb([magic, 2, hashlib.sha256(payload).digest(), payload], use_bin_type=True)
    assert decode(old) == plan


@pytest.mark.slow
@pytest.mark.parametrize(("model", "asked"), [
    ("bert_dropout", {"mesh": "dp=2", "microbatches": 3}), ("gpt2", {"mesh": "2x2", "microbatches": 2, "zero": 2}),
    ("resnet", {"mesh": "2", "microbatches": 2, "semantics": "accumulate"})], ids=str)
def test_real_ranks_train_as_one_device(model, asked):
    source = source_of(model)
    plan = compile_model(source, captured=captured(model), **asked).plan
    report = verify_plan(plan, source, ranks="gloo")
    assert report.ok, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"mesh": "dp=2", "zero": 2}, {"mesh": "dp=2"}, {"mesh": "2x2", "random_choices": 1}])
def test_real_ranks_hold_what_is_predicted(asked):
    source = load_model_source(str(FOLDER / "memory_models" / "bert.py"))
    plan = compile_model(source, microbatches=4, **asked).plan
    report = verify_plan(plan, source, ranks="gloo", dtype="f32", memory=True)
    assert report.ok and report.notes, report.text()


def test_random_decisions_of_time_are_drawn():
    program = split_in_time(captured("vit")[0], 2)
    drawn = [random_decisions(program, parse_mesh("2"), seed) for seed in range(20)]
    assert len({len(d.reduce_each) for d in drawn}) > 2 and len({len(d.held) for d in drawn}) > 2


def test_a_loss_that_the_model_rounds_is_added_up_before_it_is_rounded():
    source = source_of("bert")
    whole = capture_program(source, outputs=("loss",), precision="bf16", progress=silent)[0]
    loss = next(o for o in whole.outputs if o.kind == "loss")
    assert whole.types[loss.value].dtype == "bfloat16"
    plan = compile_model(source, mesh="2", precision="bf16", microbatches=3).plan
    loss = next(o for o in plan.program.outputs if o.kind == "loss")
    assert plan.program.types[loss.value].dtype == "float32"
    assert verify_plan(plan, source).ok
