"""Captured programs give eager's loss, gradients, buffers and outputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpar.capture import capture
from fxpar.plans.program import Ref, node_inputs
from tests.capture.equality import assert_equals_eager, run_program
from tests.capture.models import SMALL, hugging_face, numbers


@pytest.mark.parametrize("name", SMALL)
def test_small_models_equal_eager(name):
    torch.manual_seed(0)
    model, args, kwargs, loss = SMALL[name]()
    program = assert_equals_eager(model, args, kwargs, loss)
    defined = {entry.value for entry in program.inputs}
    for node in program.nodes:
        assert defined.issuperset(node_inputs(node)) and "getitem" not in node.op
        assert node.source or not node.module or name == "encoder"  # of torch's own modules no line is the user's
        defined.update(value for value in node.outputs if value >= 0)
    assert defined == set(range(len(program.types)))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit", "resnet"])
def test_transformers_models_equal_eager(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, kwargs = hugging_face()[name]()
    model.train()
    program = assert_equals_eager(model, (), kwargs, tolerance=2e-5)
    ops = {node.op for node in program.nodes}
    if name != "resnet":
        assert {"fxpar.attention.default", "fxpar.attention_backward.default"} <= ops
    assert program.structure[0] == "object"


def test_meta_model_gives_the_same_program():
    with torch.device("meta"):
        empty, args, kwargs, loss = SMALL["tied_lm"]()
    model, args, kwargs, loss = SMALL["tied_lm"]()
    real = capture(model, args, kwargs, loss=loss)
    meta_args = (args[0].to("meta"),)
    assert capture(empty, meta_args, {"targets": kwargs["targets"].to("meta")}, loss=loss) == real


def test_inputs_ties_and_positions():
    model, args, kwargs, loss = SMALL["tied_lm"]()
    program = capture(model, args, kwargs, loss=loss)
    by_name = {entry.name: entry for entry in program.inputs}
    assert by_name["tok.weight"].ties == ("head.weight",) and "head.weight" not in by_name
    assert [e.name for e in program.inputs if e.kind == "input"] == ["ids", "targets"]
    assert program.call == ("ids", "targets")
    assert [e.kind for e in program.inputs].count("tangent") == 1 and not [
        e for e in program.inputs if e.kind == "seed"
    ]


def test_paths_baked_values_and_structure():
    model, args, kwargs, loss = SMALL["wide"]()
    program = capture(model, args, kwargs, outputs="all")
    assert [e.name for e in program.inputs if e.kind == "input"] == ["batch['x'][0]", "more[0]", "labels", "step"]
    assert program.baked == (("temperature", "0.7"),)
    assert program.call == ("batch", "*more")
    assert program.structure == (
        "dict",
        ("logits", "pred", "loss"),
        ("value", 1),
        ("tuple", ("value", 2), ("const", None)),
        ("value", 0),
    )
    gradients = {output.name for output in program.outputs if output.kind == "gradient"}
    assert gradients == {"a.weight", "b.weight", "b.bias"}
    assert {e.name for e in program.inputs if e.kind == "parameter"} == dict(model.named_parameters()).keys()


def test_only_the_loss_survives_by_default():
    model, args, kwargs, loss = SMALL["wide"]()
    program = capture(model, args, kwargs)
    assert {output.kind for output in program.outputs} == {"loss", "gradient"}
    assert not any("argmax" in node.op for node in program.nodes)


def test_names_of_wrapped_modules_are_the_users():
    model, args, kwargs, loss = SMALL["compiled"]()
    program = capture(model, args, kwargs, loss=loss)
    names = {entry.name for entry in program.inputs if entry.kind == "parameter"}
    assert names == dict(model.named_parameters()).keys() and any("_orig_mod" in name for name in names)
    assert "parts.fast.1" in {node.module for node in program.nodes}
    assert dict(model.parts)["fast"] is model.parts["fast"] and hasattr(model.parts["fast"], "_orig_mod")


def test_phases_modules_and_sources():
    model, args, kwargs, loss = SMALL["vision"]()
    program = capture(model, args, kwargs, loss=loss)
    late = {entry.value for entry in program.inputs if entry.kind == "tangent"}
    for node in program.nodes:
        if node.phase == "forward":
            assert not late.intersection(node_inputs(node))
        else:
            late.update(node.outputs)
    convolution = next(node for node in program.nodes if node.op == "aten.convolution_backward.default")
    assert (
        convolution.module == "c2" and convolution.source.startswith("models.py:") and convolution.phase == "backward"
    )
    kinds = [output.kind for output in program.outputs]
    assert kinds == sorted(kinds, key=["loss", "output", "buffer", "gradient"].index)
    assert ("buffer", "b1.num_batches_tracked") in {(output.kind, output.name) for output in program.outputs}


class Dropping(nn.Module):
    """Every kind of draw: dropout, dropout of whole channels, attention dropout, rand, bernoulli."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        h = F.dropout(self.f(x), 0.25)
        h = F.dropout1d(h.transpose(1, 2), 0.5).transpose(1, 2)
        h = self.attention(h, h, h, need_weights=False)[0]
        h = h * torch.bernoulli(torch.full_like(h, 0.5)) + torch.rand_like(h) + torch.randn(8)
        return F.dropout(h, 0.25), torch.randint(3, 9, (400,)), torch.empty(5).uniform_(2.0, 3.0)


def test_draws_are_deterministic_per_seed_and_op():
    model = Dropping()
    args = (numbers(16, 10, 8),)
    program = capture(model, args, {}, loss=lambda output, inputs: output[0].sum(), outputs="all")
    draws = [node for node in program.nodes if node.op in ("fxpar.dropout.default", "fxpar.uniform.default")]
    seed = next(entry.value for entry in program.inputs if entry.kind == "seed")
    positions = {"fxpar.dropout.default": 3, "fxpar.uniform.default": 2}
    ids = [node.args[positions[node.op]] for node in draws]
    assert len(set(ids)) == len(ids) and all(node.args[1] == Ref(seed) for node in draws)
    forward, backward = (
        next(node for node in program.nodes if node.op == f"fxpar.{name}.default")
        for name in ("attention", "attention_backward")
    )
    assert forward.args[4] == backward.args[7] == Ref(seed)
    assert forward.args[9] == backward.args[12] and forward.args[9] not in ids
    one, two, other = (run_program(program, model, args, {}, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one[("output", "output[0]")], other[("output", "output[0]")])
    kept = (one[("output", "output[0]")] != 0).double().mean()
    assert abs(kept - 0.75) < 0.05
    integers, spread = one[("output", "output[1]")], one[("output", "output[2]")]
    assert set(integers.tolist()) == set(range(3, 9)) and integers.dtype == torch.int64
    assert 2.0 <= spread.min() and spread.max() < 3.0


def test_gradients_use_the_masks_of_the_forward():
    """The loss is linear in the weight, so <w, dw> is the loss exactly when both use the same masks."""
    model = nn.Sequential(nn.Linear(16, 40, bias=False), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.4))
    program = capture(model, (numbers(8, 16),), {}, loss=lambda output, inputs: output.sum())
    got = run_program(program, model, (numbers(8, 16),), {}, seed=5)
    total = (model[0].weight.detach() * got[("gradient", "0.weight")]).sum()
    torch.testing.assert_close(total, got[("loss", "loss")])


def test_eval_program_is_forward_only():
    model, args, kwargs, loss = SMALL["vision"]()
    modes = [module.training for module in model.modules()]
    program = capture(model, args, kwargs, train=False)
    assert [module.training for module in model.modules()] == modes
    assert [(output.kind, output.name) for output in program.outputs] == [("output", "output")]
    assert all(node.phase == "forward" for node in program.nodes)
    assert not [entry for entry in program.inputs if entry.kind in ("tangent", "seed")]
    got = run_program(program, model, args, kwargs)
    with torch.no_grad():
        torch.testing.assert_close(got[("output", "output")], model.eval()(*args))


def test_the_same_tensor_twice_is_two_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(7, 7)

        def forward(self, ids, labels):
            return F.cross_entropy(self.e(ids), labels)

    ids = torch.tensor([1, 2, 3])
    program = capture(Model(), (ids, ids), {})
    used = {value for node in program.nodes for value in node_inputs(node)}
    assert {e.value for e in program.inputs if e.kind == "input"} <= used
