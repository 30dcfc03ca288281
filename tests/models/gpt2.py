"""Tiny transformers GPT-2: fused qkv, tied head, vocabulary 101."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, BATCH, SEQ = 101, 6, 10


def build():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0,
                   attn_pdrop=0.0, initializer_range=0.1, use_cache=False, bos_token_id=0, eos_token_id=0)
    ).train()


def example_inputs():
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=g)
    labels = ids.clone()
    labels[0, :6] = -100
    return (), {"input_ids": ids, "labels": labels}
