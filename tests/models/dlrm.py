"""Plain torch: a deep learning recommendation model, after Naumov et al. (2019).

Bags of sparse features are summed or averaged by nn.EmbeddingBag, dense features go through a bottom MLP, and the
products of all pairs of the resulting vectors go through a top MLP.
"""

import torch
from torch import Tensor, nn

BATCH, DENSE, WIDTH, ROWS, BAG = 6, 5, 7, (11, 23, 101), 3


def mlp(*widths: int) -> nn.Sequential:
    layers = [part for a, b in zip(widths, widths[1:], strict=False) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, WIDTH, mode=mode) for rows, mode in zip(ROWS, ("sum", "mean", "sum"), strict=True)
        )
        self.bottom, self.top = mlp(DENSE, 9, WIDTH), mlp(WIDTH + 6, 13, 1)
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, dense: Tensor, sparse: Tensor, weights: Tensor) -> Tensor:
        """``dense [n, 5], sparse [3, n, bag], weights [n, bag]`` (of the last table) -> logits ``[n]``."""
        bottom = torch.relu(self.bottom(dense))
        given = (None, None, weights)
        bags = [bag(ids, per_sample_weights=w) for bag, ids, w in zip(self.bags, sparse, given, strict=True)]
        vectors = torch.stack([bottom, *bags], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


def build() -> nn.Module:
    return DLRM().train()


def example_inputs() -> tuple[tuple, dict]:
    g = torch.Generator().manual_seed(11)
    sparse = torch.stack([torch.randint(0, rows, (BATCH, BAG), generator=g) for rows in ROWS])
    return (torch.randn(BATCH, DENSE, generator=g), sparse, torch.rand(BATCH, BAG, generator=g)), {}


def loss(output: Tensor, inputs: tuple) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output, torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0]))
