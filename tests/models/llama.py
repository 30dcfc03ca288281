"""Tiny transformers Llama: 4 query heads over 2 key/value heads, odd widths, left padding."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, BATCH, SEQ = 101, 6, 10


def build():
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=6, max_position_embeddings=32, use_cache=False,
                    tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    ).train()


def example_inputs():
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCAB, (BATCH, SEQ), generator=g)
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[0, :3] = 0
    return (), {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
