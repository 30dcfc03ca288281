"""Plain torch: a bidirectional LSTM over frames and the CTC loss: lengths differ, one alignment is impossible."""

import torch
from torch import Tensor, nn

BATCH, FRAMES, BANDS, WIDTH, CLASSES = 6, 7, 5, 7, 9


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(BANDS, WIDTH, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)
        self.criterion = nn.CTCLoss(blank=CLASSES - 1, zero_infinity=True)

    def forward(self, frames: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor) -> Tensor:
        """``frames [t, n, bands], targets [n, s], lengths [n], target_lengths [n]`` -> the loss."""
        hidden, _ = self.rnn(frames)
        return self.criterion(self.head(hidden).log_softmax(-1), targets, lengths, target_lengths)


def build() -> nn.Module:
    return Recogniser().train()


def example_inputs() -> tuple[tuple, dict]:
    g = torch.Generator().manual_seed(12)
    targets = torch.randint(0, CLASSES - 1, (BATCH, 4), generator=g)
    lengths, target_lengths = torch.tensor([7, 5, 6, 2, 7, 3]), torch.tensor([4, 3, 1, 4, 2, 0])
    return (torch.randn(FRAMES, BATCH, BANDS, generator=g), targets, lengths, target_lengths), {}
