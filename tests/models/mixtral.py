"""Tiny transformers Mixtral: 3 experts, 2 of them per token, odd widths, with the routers' balance loss."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

VOCAB, BATCH, SEQ = 61, 6, 7


def build():
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCAB, hidden_size=22, intermediate_size=19, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, head_dim=6, max_position_embeddings=32,
                      num_local_experts=3, num_experts_per_tok=2, use_cache=False, tie_word_embeddings=False,
                      output_router_logits=True, router_aux_loss_coef=0.1, sliding_window=None,
                      bos_token_id=0, eos_token_id=1, pad_token_id=None,
                      experts_implementation="eager")  # transformers' kernels want rows of whole 16 bytes
    ).train()


def example_inputs():
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCAB, (BATCH, SEQ), generator=g)
    return (), {"input_ids": ids, "labels": ids}
