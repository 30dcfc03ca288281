"""GPT-2, four layers, head tied to the embedding: large enough that single numbers weigh nothing in its memory."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, SEQ = 8, 64


def build():
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=128, n_layer=4, n_head=4, n_positions=SEQ, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1)).train()


def example_inputs():
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 512, (BATCH, SEQ), generator=g)
    return (), {"input_ids": ids, "labels": ids}
