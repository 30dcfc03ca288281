"""Llama, four layers, grouped queries: small, and large enough that single numbers weigh nothing in its memory."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, SEQ = 8, 64


def build():
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ,
                                        use_cache=False, tie_word_embeddings=False)).train()


def example_inputs():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 512, (BATCH, SEQ), generator=g)
    return (), {"input_ids": ids, "labels": ids}
