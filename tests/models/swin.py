"""Tiny transformers Swin: windows of 3 over maps of 9 and 5 (padded), shifted in every second block."""

import torch
from transformers import SwinConfig, SwinForImageClassification

BATCH = 6


def build():
    return SwinForImageClassification(
        SwinConfig(image_size=18, patch_size=2, num_channels=3, embed_dim=6, depths=[2, 2], num_heads=[1, 3],
                   window_size=3, mlp_ratio=1.5, num_labels=5, hidden_dropout_prob=0.0,
                   attention_probs_dropout_prob=0.0, drop_path_rate=0.0, initializer_range=0.2)
    ).train()


def example_inputs():
    g = torch.Generator().manual_seed(8)
    return (), {"pixel_values": torch.randn(BATCH, 3, 18, 18, generator=g),
                "labels": torch.randint(0, 5, (BATCH,), generator=g)}
