"""T5, two layers on either side: small, and large enough that single numbers weigh nothing in its memory."""

import torch
from transformers import T5Config, T5ForConditionalGeneration

BATCH, SEQ = 8, 64


def build():
    return T5ForConditionalGeneration(T5Config(vocab_size=512, d_model=128, d_kv=32, d_ff=384, num_layers=2,
                                               num_heads=4, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
                                               pad_token_id=0)).train()


def example_inputs():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 512, (BATCH, SEQ), generator=g)
    return (), {"input_ids": ids, "labels": ids}
