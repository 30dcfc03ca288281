"""Plain torch: nn.TransformerEncoder with a padding mask, odd widths."""

import torch
from torch import nn

BATCH, SEQ, WIDTH = 6, 10, 24


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(101, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 3, dim_feedforward=37, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids, padding):
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding).mean(1))


def build():
    return Classifier().train()


def example_inputs():
    g = torch.Generator().manual_seed(7)
    padding = torch.zeros(BATCH, SEQ, dtype=torch.bool)
    padding[2, 6:] = True
    return (torch.randint(0, 101, (BATCH, SEQ), generator=g), padding), {}


def loss(output, inputs):
    target = torch.arange(BATCH) % 5
    return nn.functional.cross_entropy(output, target)
