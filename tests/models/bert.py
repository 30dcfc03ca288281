"""Tiny transformers BERT, masked language modelling: tied head, odd sizes, no dropout."""

import torch
from transformers import BertConfig, BertForMaskedLM

VOCAB, BATCH, SEQ = 101, 6, 10


def build(dropout: float = 0.0):
    return BertForMaskedLM(
        BertConfig(vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=41,
                   max_position_embeddings=16, type_vocab_size=2, hidden_dropout_prob=dropout,
                   attention_probs_dropout_prob=dropout, pad_token_id=0, initializer_range=0.2)
    ).train()


def example_inputs():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (BATCH, SEQ), generator=g)
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[3, 5:] = 0
    labels = torch.where(torch.rand(BATCH, SEQ, generator=g) < 0.3, ids, -100)
    labels[0, 0] = ids[0, 0]
    return (), {"input_ids": ids, "attention_mask": mask, "labels": labels}
