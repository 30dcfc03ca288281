"""A model with ops of its own: one with autograd registered, one behind an autograd.Function; rules of all four."""

import torch
from torch import Tensor, nn

import fxpar


@torch.library.custom_op("fxpartest::gated", mutates_args=())
def gated(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.sigmoid(x) * weight


@torch.library.custom_op("fxpartest::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(x)
    return grad * weight * gate * (1 + x * (1 - gate)), (grad * x * gate).sum((0, 1))


@torch.library.custom_op("fxpartest::pair_energy", mutates_args=())
def pair_energy(x: Tensor, y: Tensor) -> Tensor:
    """[b, n, h], [b, m, h] -> [b, n, m]: squared distances."""
    return (x[:, :, None] - y[:, None]).square().sum(-1)


@torch.library.custom_op("fxpartest::pair_energy_backward", mutates_args=())
def pair_energy_backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    slope = 2 * grad[..., None] * (x[:, :, None] - y[:, None])
    return slope.sum(2), -slope.sum(1)


gated.register_fake(lambda x, weight: torch.empty_like(x))
gated_backward.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
pair_energy.register_fake(lambda x, y: x.new_empty(x.shape[0], x.shape[1], y.shape[1]))
pair_energy_backward.register_fake(lambda grad, x, y: (torch.empty_like(x), torch.empty_like(y)))
gated.register_autograd(
    lambda ctx, grad: torch.ops.fxpartest.gated_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class PairEnergy(torch.autograd.Function):
    """The op behind a hand-written backward."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return torch.ops.fxpartest.pair_energy(x, y)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.fxpartest.pair_energy_backward(grad, *ctx.saved_tensors)


fxpar.rule("fxpartest::gated", "b s h, h -> b s h", linear=("1",))
fxpar.rule("fxpartest::gated_backward", "b s h, b s h, h -> b s h, h", linear=("0",), reads=("012", "01"))
fxpar.rule("fxpartest::pair_energy", "b n h, b m h -> b n m")
fxpar.rule("fxpartest::pair_energy_backward", "b n m, b n h, b m h -> b n h, b m h", linear=("0",))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.ops.fxpartest.gated(self.up(x), self.scale))
        return PairEnergy.apply(hidden, x[:, :3]).square().mean()


def build() -> nn.Module:
    return Net()


def example_inputs() -> tuple[tuple, dict]:
    return (torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0)),), {}
