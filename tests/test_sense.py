"""Plans of small clusters and models, held against what somebody who tunes them by hand would do.

Every test says what that is and why. Rates are those of the presets; figures are simulated.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict

import pytest
import torch

from fxpar.compile import compile_model
from fxpar.model_source import load_model_source
from fxpar.plans.errors import Infeasible
from fxpar.plans.layout import Replicate, Shard
from fxpar.plans.plan import Plan
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.show import splits_of

torch.set_num_threads(1)
GIB = 2**30


@pytest.fixture
def compiled(tmp_path):
    """(configuration, task, batch, seq, cluster, **request) -> plan."""

    def run(sizes, task, batch, seq, cluster, **request) -> Plan:
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        source = load_model_source(f"hf:{tmp_path}", task=task, batch=batch, seq=seq)
        return compile_model(source, cluster=cluster, **request).plan

    return run


def bert(layers=2, **sizes):
    """BERT-base but for its depth."""
    return {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": layers, **sizes}


def llama(layers, width, heads, hidden, vocab):
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "vocab_size": vocab,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": hidden, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }


def split(plan: Plan) -> dict[str, dict[str, float]]:
    """Per axis the dims that it splits, with their share of the flops of the forward's products."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for s in splits_of(plan):
        if s.share > 0.005:
            found[s.axis][s.name] = s.share
    return dict(found)


def parameters(plan: Plan):
    """(name, elements, into how many pieces it is stored) of every parameter."""
    for item, layout in zip(plan.program.inputs, plan.decisions.inputs, strict=True):
        if item.kind == "parameter":
            pieces = math.prod(
                n for p, n in zip(layout, plan.decisions.mesh.sizes, strict=True) if isinstance(p, Shard)
            )
            assert all(isinstance(p, (Shard, Replicate)) for p in layout)
            yield item.name, math.prod(plan.program.types[item.value].shape), pieces


def never_slower_than_by_hand(plan: Plan) -> bool:
    return all(c.prediction.step_ns >= plan.prediction.step_ns for c in plan.candidates if c.fits)


def all_batch(plan: Plan) -> bool:
    """Every axis splits the batch of every product, and nothing else."""
    axes = [a.name for a in plan.decisions.mesh.axes if a.size > 1]
    return all(split(plan).get(a, {}).keys() == {"batch"} for a in axes)


@pytest.mark.parametrize("layers", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_bert_base_on_one_node_is_data_parallel(compiled, layers):
    """110 million parameters beside 64 x 512 tokens: reducing 0.4 GiB of gradients takes 3 ms on NVLink and hides
    behind a backward ten times as long, while splitting products would send activations on the critical path. So every
    rank takes an eighth of the batch; memory does not bind, so parameters may be whole (data parallel) or in pieces
    (ZeRO)."""
    plan = compiled(bert(layers), "masked-lm", 64, 512, "1x8:h100")
    assert all_batch(plan) and never_slower_than_by_hand(plan)
    by_hand = min(c.prediction.step_ns for c in plan.candidates if c.name in ("data parallel", "ZeRO-3"))
    assert plan.prediction.step_ns > 0.99 * by_hand


def test_three_ranks_split_the_batch_where_nothing_else_divides(compiled):
    """Width 512, 8 heads, 2048 hidden values: a third of any of them is a fragment that fills no tile, a third of 24
    samples is 8. So the layers are data parallel. The vocabulary may be cut (as Megatron does, padded): that spares
    the all-reduce of the largest gradient and costs two transfers of [tokens, 512]."""
    sizes = bert(vocab_size=32000, hidden_size=512, num_attention_heads=8, intermediate_size=2048)
    plan = compiled(sizes, "masked-lm", 24, 128, "1x3:h100")
    assert split(plan)["a0"].keys() <= {"batch", "vocab"}
    assert never_slower_than_by_hand(plan)
    for name, _, pieces in parameters(plan):
        assert pieces == 1 or "word_embeddings" in name or name.endswith("predictions.bias"), name


def test_three_ranks_split_heads_where_the_batch_does_not_divide(compiled):
    """One sample of 512 tokens on three ranks: there is no batch to split, and 12 heads, 3072 hidden values and 30522
    words are all divisible by three. So it is tensor parallel, in even pieces."""
    plan = compiled(bert(1), "masked-lm", 1, 512, "1x3:h100")
    assert {"heads", "ffn", "vocab"} >= split(plan)["a0"].keys() - {"sequence"} >= {"heads"}
    assert all(s.size % s.pieces == 0 for s in splits_of(plan))
    by_hand = next(c for c in plan.candidates if c.name == "data parallel")
    assert by_hand.prediction.step_ns > 1.5 * plan.prediction.step_ns


def test_across_a_slow_network_goes_the_batch(compiled):
    """Two nodes of four PCIe cards on 100 Gb/s. Tensor parallelism would send activations over the slow link in every
    layer; the batch sends gradients once. One all-reduce over all eight ranks sends least, and that is what data
    parallel training does by hand: the mesh of all ranks on one axis must be among those tried."""
    plan = compiled(bert(1), "masked-lm", 64, 512, "2x4:l40s")
    assert all_batch(plan) and never_slower_than_by_hand(plan)
    assert {c.mesh.sizes for c in plan.candidates} == {(2, 4), (8,)}


def test_between_nodes_only_a_part_of_the_gradients_travels(compiled):
    """The same on a mesh of nodes and devices: gradients are reduced and scattered inside the node first, so that each
    card sends a quarter of them over the slow link (ZeRO inside the node). With half the batch it would be a near
    thing: sending the gradients of a large embedding takes as long as one node's share of the work."""
    plan = compiled(bert(1), "masked-lm", 128, 512, "2x4:l40s", mesh="2x4")
    assert all_batch(plan)
    gradients = 4 * sum(elements for _, elements, _ in parameters(plan))
    # an all-reduce sends what a reduce-scatter and an all-gather of the same tensor send together
    sent = sum(c.bytes * (2 if c.kind == "all_reduce" else 1) for c in plan.prediction.collectives if c.axis == "a0")
    assert sent < 0.27 * 2 * gradients


def test_no_tensor_parallelism_crosses_a_slow_network(compiled):
    """Two samples of 2048 tokens: too few for data parallelism over eight ranks, so heads, hidden values or the
    vocabulary are split inside the node. Over the slow link goes at most the batch; where even reducing gradients costs
    more than half of the compute, both nodes do the same."""
    plan = compiled(llama(1, 1024, 16, 2816, 32000), "causal-lm", 2, 2048, "2x4:l40s", mesh="2x4", precision="bf16")
    assert split(plan).get("a0", {}).keys() <= {"batch"}
    assert split(plan)["a1"].keys() & {"heads", "ffn", "vocab", "sequence"}
    assert never_slower_than_by_hand(plan)


def test_a_huge_vocabulary_is_split(compiled):
    """262144 words of width 1024 beside 8192 tokens: head and embedding are 1 GiB of gradients each, what goes into the
    head is 16 MiB. So the head and its loss are split over words (statistics of the softmax are all that is reduced),
    the embedding is stored in pieces, and the layers, which are small, split the batch."""
    plan = compiled(llama(1, 1024, 16, 2816, 262144), "causal-lm", 8, 1024, "1x8:h100", precision="bf16")
    assert sum(by["vocab"] for by in split(plan).values() if "vocab" in by) > 0.8
    stored = {name: pieces for name, _, pieces in parameters(plan)}
    assert stored["lm_head.weight"] == stored["model.embed_tokens.weight"] == 8
    by_hand = min(c.prediction.step_ns for c in plan.candidates if c.name in ("data parallel", "ZeRO-3"))
    assert by_hand > 1.5 * plan.prediction.step_ns


def test_logits_that_do_not_fit_are_never_whole(compiled):
    """One sample of 8192 tokens and 262144 words: logits in float32 are 8 GiB, and backward wants three of them at
    once, more than the card has. There is no batch to split; words (or tokens) are, by eight."""
    plan = compiled(llama(1, 512, 8, 1024, 262144), "causal-lm", 1, 8192, "1x8:4090", precision="bf16", mesh="8")
    assert plan.prediction.peak_bytes < plan.memory_bytes / 2
    assert not next(c for c in plan.candidates if c.name == "data parallel").fits
    logits = 8191 * 262144
    local = rewrite(plan.program, plan.decisions, (0,), every_pass=False)
    large = [v for v, (of, _) in enumerate(local.origins)
             if of >= 0 and math.prod(plan.program.types[of].shape) >= logits]
    assert large
    assert all(math.prod(local.types[v].shape) <= logits // 8 + 262144 for v in large)


def check_all_in_pieces(plan: Plan, world: int) -> None:
    """Parameters, gradients and moments take an ``world``-th each, small vectors aside."""
    p = plan.prediction
    whole = sum(elements for _, elements, _ in parameters(plan))
    static = p.parameter_bytes + p.gradient_bytes + p.optimizer_bytes
    assert 16 * whole / world <= static * 1.001 and static <= 1.02 * 16 * whole / world
    assert p.peak_bytes <= plan.memory_bytes
    assert all(pieces == world for _, elements, pieces in parameters(plan) if elements > 2**20)


def test_what_fits_only_in_pieces_is_stored_in_pieces(compiled):
    """A small Llama whose parameters, gradients and moments (16 bytes a parameter) are five times the card: all of it
    is stored over all eight ranks, as with ZeRO-3 or tensor parallelism; with less than an eighth of it the model is
    refused, with the bytes it needs."""
    sizes = llama(1, 1024, 16, 2816, 16000)
    plan = compiled(sizes, "causal-lm", 8, 128, "1x8:4090", precision="bf16", mesh="8", memory=150 * 2**20)
    check_all_in_pieces(plan, 8)
    assert never_slower_than_by_hand(plan)
    with pytest.raises(Infeasible) as caught:
        compiled(sizes, "causal-lm", 8, 128, "1x8:4090", precision="bf16", mesh="8", memory=80 * 2**20)
    assert "does not fit: it needs" in str(caught.value) and "of 80.0 MiB per device" in str(caught.value)


@pytest.mark.slow
def test_seven_billion_parameters_on_eight_cards_of_24_gib(compiled):
    """Llama-7B with AdamW: 16 bytes a parameter are 100 GiB, 12.6 GiB on each of eight cards when all of it is in
    pieces, which leaves 9 GiB for activations: that takes recomputation, or sequence and tensor parallelism. Nothing
    else fits, and data parallel needs 100 GiB."""
    sizes = llama(32, 4096, 32, 11008, 32000)
    plan = compiled(sizes, "causal-lm", 8, 2048, "1x8:4090", precision="bf16")
    check_all_in_pieces(plan, 8)
    assert plan.decisions.recompute and never_slower_than_by_hand(plan)
    whole = next(c for c in plan.candidates if c.name == "data parallel")
    assert not whole.fits and whole.prediction.peak_bytes > 100 * GIB
