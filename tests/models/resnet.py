"""Tiny transformers ResNet: batch norm over the global batch of 6, running statistics."""

import torch
from transformers import ResNetConfig, ResNetForImageClassification

BATCH = 6


def build():
    return ResNetForImageClassification(
        ResNetConfig(num_channels=3, embedding_size=6, hidden_sizes=[6, 10], depths=[1, 2], layer_type="basic",
                     num_labels=5)
    ).train()


def example_inputs():
    g = torch.Generator().manual_seed(6)
    x = torch.randn(BATCH, 3, 21, 21, generator=g)
    x[4:] += 1.0
    return (), {"pixel_values": x, "labels": torch.randint(0, 5, (BATCH,), generator=g)}
