"""Rows that are softmaxed, normalised, summed up and searched: every dim that takes several steps when it is split."""

import torch
from torch import Tensor, nn

BATCH, LENGTH, WIDTH = 4, 6, 10


class Net(nn.Module):
    """A layer norm, a softmax over the width and one over the sequence, running sums, the place of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)
        self.plain = nn.LayerNorm([LENGTH, WIDTH], elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x)) + self.plain(x)
        h = h * h.softmax(-1) + h.softmax(1)
        h = self.down(h + 0.1 * h.cumsum(1))
        best = h.detach().argmax(-1, keepdim=True).to(h.dtype)
        return h.logsumexp(-1, keepdim=True) + h.max(-1, keepdim=True).values * best + h / h.norm(dim=-1, keepdim=True)


def build() -> nn.Module:
    return Net()


def example_inputs() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    return (torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3)),), {}


def loss(output: Tensor, inputs: object) -> Tensor:
    return output.square().mean()
