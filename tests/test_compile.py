"""From a model to the bytes of a plan: the same in every process, and device-neutral; errors name what is wrong."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fxpar.captured import build_model
from fxpar.compile import chosen_cluster, compile_model
from fxpar.model_source import ModelSource, load_model_source
from fxpar.plans.check import plan_problems
from fxpar.plans.codec import encode, program_digest
from fxpar.plans.errors import FxparError
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.program import Arg
from fxpar.rules.fingerprint import rules_digest
from fxpar.rules.registry import rule_for
from fxpar.version import VERSION
from tests.compiled import captured, decoder_plan, decoder_program, mlp_plan

torch.set_num_threads(1)

BERT = '''
import torch
from transformers import BertConfig, BertForMaskedLM


def build():
    return BertForMaskedLM(BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))


def example_inputs():
    ids = torch.arange(32).reshape(4, 8)
    return (ids,), {"labels": ids}
'''

PROCESS = """
import hashlib, sys, torch
torch.set_num_threads(1)
from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.plans.codec import encode
print(hashlib.sha256(encode(compile_model(load_model_source(sys.argv[1]), mesh="2").plan)).hexdigest())
"""


def test_the_same_bytes_in_every_process(model_file, repository):
    """A tiny BERT in three processes with other hash seeds, one after the other or at once."""
    path = model_file(BERT)
    processes = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROCESS, path], cwd=repository, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"})
        for seed in ("0", "1", "4242")
    ]
    said = [p.communicate(timeout=300) for p in processes]
    assert all(p.returncode == 0 for p in processes), said[0][1]
    digests = {out.strip() for out, _ in said}
    assert len(digests) == 1 and len(digests.pop()) == 64


def test_the_same_bytes_twice_in_one_process():
    taken, source = captured("mlp")
    first, second = (compile_model(source, mesh="2x2", captured=taken).plan for _ in range(2))
    assert encode(first) == encode(second) == encode(mlp_plan("2x2"))
    fresh = compile_model(source, mesh="2x2").plan
    assert hashlib.sha256(encode(fresh)).digest() == hashlib.sha256(encode(first)).digest()


def atoms(arg: Arg):
    if isinstance(arg, tuple):
        for item in arg:
            yield from atoms(item)
    else:
        yield arg


@pytest.mark.parametrize("make", [mlp_plan, decoder_plan])
def test_plans_are_device_neutral(make):
    plan = make("2")
    for node in plan.program.nodes:
        assert rule_for(node.op) is not None, node.op
        assert not any(word in node.op for word in ("flash", "efficient", "cudnn", "mkldnn", "cuda", "_cpu")), node.op
        for atom in (a for arg in node.args for a in atoms(arg)):
            assert not (isinstance(atom, str) and ("cuda" in atom or "cpu" in atom)), node


def test_a_plan_says_what_it_was_made_from():
    plan = decoder_plan("2")
    assert plan.fingerprint.program == program_digest(decoder_program())
    assert plan.fingerprint.rules == rules_digest()
    assert plan.fingerprint.torch == torch.__version__.partition("+")[0] and plan.fingerprint.fxpar == VERSION
    classes = [name for name, digest in plan.fingerprint.modules if len(digest) == 64]
    assert {c.rpartition(".")[2] for c in classes} == {"Decoder", "Layer"}
    made = dict(plan.provenance)
    assert made["model"] == "decoder" and made["precision"] == "fp32"
    assert list(plan_problems(plan)) == []
    # the simulated memory of AdamW: two moments, measured
    assert plan.prediction.optimizer_bytes == 2 * plan.prediction.parameter_bytes


def test_pinned_axes_are_said_to_be_pinned():
    assert decoder_plan("dp=2").certificate.status == "pinned"
    assert decoder_plan("2").certificate.status in ("optimal", "feasible")


def test_models_are_built_with_their_seed_and_values():
    _, source = captured("mlp")
    one, two = build_model(source), build_model(source)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert all(p.device.type == "cpu" for p in one.parameters())


@pytest.mark.parametrize(("text", "words"), [
    ("def build(: pass", "SyntaxError|syntax"),
    ("x = 1", "build"),
    ("def build(): raise ValueError('no')\ndef example_inputs(): return (), {}", "no"),
    ("import torch\ndef build(): return torch.nn.Linear(2, 2)", "example_inputs"),
    ("import torch\ndef build(): return torch.nn.Linear(2, 2)\n"
     "def example_inputs(): return (torch.ones(2, 3),), {}\ndef loss(o, i): return o.sum()", "reduction dim|shapes"),
    ("import torch\ndef build(): return torch.nn.Linear(2, 2)\ndef example_inputs(): return (torch.ones(2, 2),), {}",
     "loss"),
    ("import torch\ndef build(): return 7\ndef example_inputs(): return (), {}", "Module"),
])
def test_a_model_py_that_is_wrong(model_file, text, words):
    with pytest.raises(FxparError) as caught:
        compile_model(load_model_source(model_file(text)), mesh="2")
    assert any(word in str(caught.value) for word in words.split("|")), str(caught.value)


def test_neither_mesh_nor_cluster():
    with pytest.raises(FxparError, match="neither"):
        compile_model(captured("mlp")[1])


def test_the_mesh_must_use_the_cluster():
    with pytest.raises(FxparError, match="has 4 ranks and cluster 1x8:h100 8 devices"):
        chosen_cluster("1x8:h100", parse_mesh("2x2"))
    assert chosen_cluster("2x4:h100", parse_mesh("8")).world_size == 8
    assert chosen_cluster(None, parse_mesh("3")).world_size == 3
    assert chosen_cluster("2x8:h100", None).world_size == 16


def test_a_model_that_trains_nothing():
    """A frozen model: a plan without gradients, or words."""
    def build():
        return nn.Linear(4, 4).requires_grad_(False)

    source = ModelSource("frozen", build, lambda: ((torch.ones(4, 4),), {}), lambda o, _: o.sum(), torch.optim.AdamW)
    with pytest.raises(FxparError, match="grad"):
        compile_model(source, mesh="2")


LOADING = """
import sys
import fxpar
fxpar.load
assert "ortools" not in sys.modules, "ortools"
from fxpar.plans.codec import read_plan
from fxpar.runtime.rewrite.passes import rewrite
plan = read_plan(sys.argv[1])
rewrite(plan.program, plan.decisions, (0, 0))
import fxpar.runtime.execute, fxpar.runtime.virtual
print([m for m in ("ortools", "fxpar.solver", "fxpar.capture", "fxpar.compile", "transformers") if m in sys.modules])
"""


def test_loading_needs_no_solver(tmp_path: Path, repository):
    path = tmp_path / "plan.msgpack"
    path.write_bytes(encode(mlp_plan("2x2")))
    done = subprocess.run([sys.executable, "-c", LOADING, str(path)], cwd=repository, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_a_bf16_plan_is_faster_where_units_are():
    half = decoder_plan(None, precision="bf16", cluster="1x2:h100")
    full = decoder_plan(None, precision="fp32", cluster="1x2:h100")
    assert half.prediction.parameter_bytes == full.prediction.parameter_bytes
    assert half.prediction.activation_bytes < full.prediction.activation_bytes
    assert dict(half.provenance)["precision"] == "bf16"
