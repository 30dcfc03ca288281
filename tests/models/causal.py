"""One pre-norm layer of causal attention with shared key heads, and one of attention under a mask."""

import torch
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, HEADS, SHARED = 2, 10, 16, 4, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pair, self.out = nn.Linear(WIDTH, 2 * WIDTH * SHARED // HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.query(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.pair(h).unflatten(-1, (2 * SHARED, -1)).transpose(1, 2).chunk(2, 1)
        attend = nn.functional.scaled_dot_product_attention
        causal = attend(q, k, v, is_causal=True, enable_gqa=True)
        masked = attend(q, k, v, attn_mask=mask, enable_gqa=True)
        return x + self.out((causal + masked).transpose(1, 2).flatten(2))


def build() -> nn.Module:
    return Net()


def example_inputs() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    g = torch.Generator().manual_seed(5)
    mask = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=g) < 0.4
    mask[0, 0, 3] = False  # no key at all
    return (torch.randn(BATCH, LENGTH, WIDTH, generator=g), mask), {}


def loss(output: Tensor, inputs: object) -> Tensor:
    return output.square().mean()
