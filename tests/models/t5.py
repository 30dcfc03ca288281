"""Tiny transformers T5: encoder and decoder, relative position bias, tied embeddings."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

VOCAB, BATCH, SOURCE, TARGET = 101, 6, 10, 7


def build():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=24, d_kv=8, d_ff=37, num_layers=2, num_heads=3, dropout_rate=0.0,
                 relative_attention_num_buckets=8, relative_attention_max_distance=16, use_cache=False,
                 decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    ).train()


def example_inputs():
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(2, VOCAB, (BATCH, SOURCE), generator=g)
    labels = torch.randint(2, VOCAB, (BATCH, TARGET), generator=g)
    labels[1, 4:] = -100
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
