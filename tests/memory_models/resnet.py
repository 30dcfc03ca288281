"""ResNet of basic blocks, batch norm: small, and large enough that single numbers weigh nothing in its memory."""

import torch
from transformers import ResNetConfig, ResNetForImageClassification

BATCH = 8


def build():
    return ResNetForImageClassification(ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 96, 128],
                                                     depths=[1, 1, 1, 1], layer_type="basic", num_labels=10)).train()


def example_inputs():
    g = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 64, 64, generator=g)
    return (), {"pixel_values": images, "labels": torch.randint(0, 10, (BATCH,), generator=g)}
