"""Tiny transformers ViT for image classification."""

import torch
from transformers import ViTConfig, ViTForImageClassification

BATCH = 6


def build():
    return ViTForImageClassification(
        ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37, image_size=12,
                  patch_size=4, num_channels=3, num_labels=5, hidden_dropout_prob=0.0,
                  attention_probs_dropout_prob=0.0, initializer_range=0.2)
    ).train()


def example_inputs():
    g = torch.Generator().manual_seed(5)
    return (), {"pixel_values": torch.randn(BATCH, 3, 12, 12, generator=g),
                "labels": torch.randint(0, 5, (BATCH,), generator=g)}
