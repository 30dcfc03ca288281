"""Tiny transformers Whisper: convolutions over a spectrogram, encoder, decoder with cross attention, tied head."""

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

VOCAB, BATCH, FRAMES, TARGET = 101, 6, 18, 7


def build():
    return WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=VOCAB, num_mel_bins=5, d_model=24, encoder_layers=2, decoder_layers=2,
                      encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=37, decoder_ffn_dim=41,
                      max_source_positions=FRAMES // 2, max_target_positions=12, dropout=0.0, attention_dropout=0.0,
                      activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, init_std=0.2,
                      use_cache=False, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                      suppress_tokens=[], begin_suppress_tokens=[])
    ).train()


def example_inputs():
    g = torch.Generator().manual_seed(10)
    labels = torch.randint(3, VOCAB, (BATCH, TARGET), generator=g)
    labels[4, 3:] = -100
    return (), {"input_features": torch.randn(BATCH, 5, FRAMES, generator=g), "labels": labels}
