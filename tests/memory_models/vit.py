"""ViT, four layers, 64 patches: small, and large enough that single numbers weigh nothing in its memory."""

import torch
from transformers import ViTConfig, ViTForImageClassification

BATCH = 8


def build():
    return ViTForImageClassification(ViTConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
                                               intermediate_size=512, image_size=64, patch_size=8, num_labels=10,
                                               hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()


def example_inputs():
    g = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 64, 64, generator=g)
    return (), {"pixel_values": images, "labels": torch.randint(0, 10, (BATCH,), generator=g)}
