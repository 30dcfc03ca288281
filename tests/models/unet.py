"""Plain torch: a UNet with group norm, skips, strided and transposed convolutions, and interpolating upsampling."""

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, CLASSES = 6, 3


class Block(nn.Module):
    """Two convolutions, each normalised in groups, around a residual."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(groups, outputs), nn.GroupNorm(1, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.norm1(self.first(x)))
        return self.skip(x) + functional.silu(self.norm2(self.second(hidden)))


class UNet(nn.Module):
    """[n, 3, 13, 11] -> [n, classes, 13, 11]; maps of 7x6 and 4x3 below."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.low = Block(3, 6, 3), Block(6, 9, 3), Block(9, 10, 5)
        self.down1, self.down2 = nn.Conv2d(6, 6, 3, stride=2, padding=1), nn.MaxPool2d(2, ceil_mode=True)
        self.up = nn.ConvTranspose2d(10, 9, 2, stride=2)
        self.middle_up, self.leave = Block(18, 9, 3), Block(15, 6, 2)
        self.head = nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.enter(x)
        middle = self.middle(self.down1(wide))
        low = self.low(self.down2(middle))
        raised = self.up(low)[:, :, : middle.shape[2], : middle.shape[3]]
        middle = self.middle_up(torch.cat([middle, raised], 1))
        raised = functional.interpolate(middle, size=wide.shape[2:], mode="bilinear", align_corners=False)
        return self.head(self.leave(torch.cat([wide, raised], 1)))


def build() -> nn.Module:
    return UNet().train()


def example_inputs() -> tuple[tuple, dict]:
    g = torch.Generator().manual_seed(9)
    return (torch.randn(BATCH, 3, 13, 11, generator=g),), {}


def loss(output: Tensor, inputs: tuple) -> Tensor:
    target = torch.arange(BATCH * 13 * 11).reshape(BATCH, 13, 11) % CLASSES
    target[2, :4] = -100
    return functional.cross_entropy(output, target, ignore_index=-100)
