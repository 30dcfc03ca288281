import json

import pytest
import torch

from fxpar.model_source import load_model_source
from fxpar.plans.errors import FxparError

SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
CONFIGURATIONS = {
    "llama": dict(model_type="llama", vocab_size=61, num_key_value_heads=1, max_position_embeddings=24, **SMALL),
    "gpt2": dict(model_type="gpt2", vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=24),
    "bert": dict(model_type="bert", vocab_size=61, max_position_embeddings=24, num_labels=3, **SMALL),
    "t5": dict(model_type="t5", vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
               decoder_start_token_id=0, pad_token_id=0),
    "vit": dict(model_type="vit", image_size=32, patch_size=16, **SMALL),
    "resnet": dict(model_type="resnet", embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic"),
}


@pytest.fixture
def folder(tmp_path):
    def write(name: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIGURATIONS[name]))
        return f"hf:{tmp_path / name}"

    return write


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("llama", "causal-lm"),
        ("gpt2", "causal-lm"),
        ("llama", "seq-cls"),
        ("bert", "masked-lm"),
        ("bert", "seq-cls"),
        ("t5", "seq2seq-lm"),
        ("vit", "image-classification"),
        ("resnet", "image-classification"),
    ],
)
def test_a_folder_with_a_configuration_trains(folder, name, task):
    seq = None if task == "image-classification" else 9
    source = load_model_source(folder(name), task=task, seq=seq, batch=3)
    with torch.device("meta"):
        assert all(p.is_meta for p in source.build().parameters())
        assert all(x.is_meta for x in source.example_inputs()[1].values())
    torch.manual_seed(source.seed)
    model = source.build()
    args, kwargs = source.example_inputs()
    assert model.training and all(p.dtype == torch.float32 for p in model.parameters())
    assert all(x.shape[0] == 3 for x in kwargs.values()) and (seq is None or kwargs["input_ids"].shape == (3, 9))
    again = source.example_inputs()[1]
    assert all(torch.equal(x, again[key]) for key, x in kwargs.items())
    loss = source.loss(model(*args, **kwargs), (args, kwargs))
    loss.backward()
    assert loss.isfinite() and any(p.grad.abs().sum() > 0 for p in model.parameters() if p.grad is not None)


def test_sizes_have_defaults_and_dtype_can_be_given(folder):
    source = load_model_source(folder("llama"), task="causal-lm", dtype="bf16")
    assert source.meta == {"task": "causal-lm", "batch": 8, "seq": 24}
    assert source.example_inputs()[1]["input_ids"].shape == (8, 24)
    assert all(p.dtype == torch.bfloat16 for p in source.build().parameters())


def test_what_is_wrong_is_said_in_full(folder, tmp_path):
    bert = folder("bert")
    with pytest.raises(FxparError, match="needs --task\n.*causal-lm, masked-lm"):
        load_model_source(bert)
    with pytest.raises(FxparError, match="no task is called 'poetry'"):
        load_model_source(bert, task="poetry")
    with pytest.raises(FxparError, match="a t5 model has no head for --task masked-lm\n(.*\n)?.*seq2seq-lm"):
        load_model_source(folder("t5"), task="masked-lm")
    with pytest.raises(FxparError, match="there is no file"):
        load_model_source("hf:meta-llama/Llama-3-8B", task="causal-lm")
    with pytest.raises(FxparError, match="--batch 0 is not a size"):
        load_model_source(bert, task="masked-lm", batch=0)
    with pytest.raises(FxparError, match="--seq 4 has no meaning"):
        load_model_source(folder("vit"), task="image-classification", seq=4)
    (tmp_path / "broken").mkdir()
    for text in ("{", '{"model_type": "no-such-model"}', "{}"):
        (tmp_path / "broken" / "config.json").write_text(text)
        with pytest.raises(FxparError, match="cannot read the configuration"):
            load_model_source(f"hf:{tmp_path / 'broken'}", task="causal-lm")
