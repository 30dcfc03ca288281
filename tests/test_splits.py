"""What the report says of split dims, and the decisions it is there for: experts and sequences are split when they pay.

The decisions are asked of configurations of one layer with the dims of the real model: layers share their decisions.
"""

import json
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.plans.codec import decode, encode
from fxpar.plans.plan import Plan
from fxpar.show import plan_facts, plan_text, splits_of, why
from fxpar.splits import cut_factors, keeps_whole
from tests.compiled import decoder_plan

torch.set_num_threads(1)

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768, "num_local_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {"mixtral": (MIXTRAL, 4096), "long": (LLAMA_8B, 131072), "wide": (LLAMA_8B, 4096)}


@cache
def plan_of(name: str, batch: int, cluster: str, layers: int = 1) -> Plan:
    """The plan of a model of :data:`SIZES` on a mesh of the cluster's own shape."""
    pytest.importorskip("transformers")
    configuration, length = SIZES[name]
    nodes, _, devices = cluster.partition(":")[0].partition("x")
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (Path(folder) / "config.json").write_text(json.dumps({**configuration, "num_hidden_layers": layers}))
        source = load_model_source(f"hf:{folder}", task="causal-lm", seq=length, batch=batch)
        mesh = devices if nodes == "1" else f"{nodes}x{devices}"
        return compile_model(source, cluster=cluster, mesh=mesh, precision="bf16").plan


def dims_of(plan: Plan) -> set[str]:
    return {s.name for s in splits_of(plan)}


def check_experts(plan: Plan) -> None:
    facts = plan_facts(plan)
    experts = [s for s in facts["splits"] if s["dim"] == "experts"]
    assert experts and all(s["size"] == 8 and s["share"] > 0.3 for s in experts)
    axis, pieces = experts[0]["axis"], experts[0]["pieces"]
    (line,) = [text for text in facts["why"] if text.startswith("experts")]
    assert line.startswith(f"experts split over {axis}: {8 // pieces} of 8 per rank (balanced routing assumed)")
    assert "of their weights a device stores" in line and f"with {keeps_whole('experts')}" in line
    beside = next(c for c in facts["candidates"] if c["name"] == keeps_whole("experts"))
    assert beside["prediction"]["step_ns"] >= facts["prediction"]["step_ns"]
    assert line in plan_text(plan)


def check_sequence(plan: Plan, length: int) -> None:
    sequence = [s for s in splits_of(plan) if s.name == "sequence"]
    assert sequence and max(s.size for s in sequence) == length
    assert any(text.startswith("sequence split over") for text in why(plan))


def test_mixtral_splits_its_experts():
    check_experts(plan_of("mixtral", 16, "1x8:h100"))


def test_a_long_sequence_of_one_sample_is_split():
    check_sequence(plan_of("long", 1, "1x8:h100"), 131072)


def test_many_samples_are_split_instead_of_the_sequence():
    plan = plan_of("wide", 64, "1x8:h100")
    assert "batch" in dims_of(plan) and "sequence" not in dims_of(plan)
    assert why(plan) == []


@pytest.mark.slow
def test_the_same_on_four_nodes():
    check_experts(plan_of("mixtral", 64, "4x8:h100", 2))
    check_sequence(plan_of("long", 1, "4x8:h100", 2), 131072)
    assert "sequence" not in dims_of(plan_of("wide", 256, "4x8:h100", 2))


def test_names_and_shares_survive_the_file():
    plan = decoder_plan("2x2")
    again = decode(encode(plan))
    assert splits_of(again) == splits_of(plan)
    for s in splits_of(plan):
        assert s.axis in ("a0", "a1") and 0 < s.share <= 1 and s.size > 1 and s.pieces in (2, 4)
        assert f"{s.name} {s.share:.0%}" in plan_text(plan)
    assert json.loads(json.dumps(plan_facts(plan)))["splits"] == plan_facts(plan)["splits"]


@pytest.mark.parametrize(("choice", "cut"), [(".", []), ("p1", []), ("f3", [3]), ("f2+3", [2, 3, 4])])
def test_factors_of_a_choice(choice, cut):
    assert list(cut_factors(choice)) == cut
