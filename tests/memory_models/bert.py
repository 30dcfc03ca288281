"""BERT, six layers: small, and large enough that single numbers weigh nothing in its memory."""

import torch
from transformers import BertConfig, BertForMaskedLM

BATCH, SEQ = 8, 64


def build():
    return BertForMaskedLM(BertConfig(vocab_size=512, hidden_size=128, num_hidden_layers=6, num_attention_heads=4,
                                      intermediate_size=512, max_position_embeddings=SEQ, hidden_dropout_prob=0.0,
                                      attention_probs_dropout_prob=0.0)).train()


def example_inputs():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 512, (BATCH, SEQ), generator=g)
    return (), {"input_ids": ids, "labels": ids}
