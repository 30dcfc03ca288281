"""Small models of many layers. Entries: name -> (depth) -> (model, args, kwargs, loss)."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.models import labels, numbers

WIDTH = 6


def mean_square(output, inputs):
    return output.square().mean()


class Block(nn.Module):
    """Residual MLP with dropout, a running statistic, a mask that all blocks read and a bias that the first makes."""

    def __init__(self, number, dropout=0.0, norm=False, scale=1.0, rounds=1):
        super().__init__()
        self.number, self.dropout, self.scale = number, dropout, scale
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.steps = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(rounds)])
        self.scales = None

    def forward(self, x, mask=None, bias=None):
        y = self.norm(x)
        for step in self.steps:
            y = torch.tanh(step(y)) * self.scale
        if mask is not None:
            y = y.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        if bias is not None:
            y = y + bias
        return x + F.dropout(y, self.dropout, self.training)


class Deep(nn.Module):
    """``shared``: the first block's weight is read by every block; ``tied``: the head is the embedding."""

    def __init__(self, blocks, shared=False, masked=False, tied=False, extra=lambda number, depth, x: x):
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.enter.weight
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if shared else None
        self.masked, self.extra, self.depth = masked, extra, len(blocks)

    def forward(self, x, mask=None):
        x = self.enter(x)
        bias = None if self.bias is None else self.bias * 2.0
        for number, block in enumerate(self.blocks):
            x = self.extra(number, self.depth, block(x, mask if self.masked else None, bias)) * 1.5
        return self.head(x)


def deep(blocks, **traits):
    mask = torch.ones(4, dtype=torch.long)
    mask[1] = 0
    return Deep(blocks, **traits), (numbers(4, WIDTH), mask), {}, mean_square


def encoder(depth):
    layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.1, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), (numbers(3, 5, 8),), {}, mean_square


def hugging_face(name, depth):
    """A tiny transformers model of ``depth`` layers (encoder and decoder each)."""
    import transformers as hf

    ids = labels(48, 2, 6) + 2
    text = {"input_ids": ids, "labels": ids}
    size = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
    wide = {"hidden_size": 16, "intermediate_size": 11, "num_hidden_layers": depth, "num_attention_heads": 4}
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**size, **wide, num_key_value_heads=2)), text
    if name == "mixtral":
        sizes = {"num_key_value_heads": 2, "num_local_experts": 4}
        return hf.MixtralForCausalLM(hf.MixtralConfig(**size, **wide, **sizes)), text
    if name == "gpt2":
        sizes = {"n_positions": 8, "n_embd": 12, "n_layer": depth, "n_head": 3}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**size, **sizes)), text
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**size, **wide, max_position_embeddings=8)), text
    if name == "t5":
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 9, "num_layers": depth, "num_heads": 2}
        return hf.T5ForConditionalGeneration(hf.T5Config(**size, **sizes, decoder_start_token_id=0)), text
    assert name == "vit"
    config = hf.ViTConfig(image_size=8, patch_size=4, num_labels=3, **wide)
    return hf.ViTForImageClassification(config), {"pixel_values": numbers(2, 3, 8, 8), "labels": labels(3, 2)}
