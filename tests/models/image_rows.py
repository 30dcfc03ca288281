"""A ResNet stem, depthwise and dilated convolutions, pooling: rows of images that neighbours exchange."""

import torch
from torch import Tensor, nn

BATCH = 2


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.GELU(),
        nn.Conv2d(4, 6, 3, padding=2, dilation=2), nn.AvgPool2d(2, stride=1), nn.Conv2d(6, 5, 1, stride=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def example_inputs() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (torch.randn(BATCH, 3, 34, 30, generator=torch.Generator().manual_seed(4)),), {}


def loss(output: Tensor, inputs: object) -> Tensor:
    return output.square().mean()
