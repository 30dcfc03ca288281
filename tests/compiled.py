"""Small models, their programs and plans, each made once per process: capturing and solving take seconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from fxpar.captured import Captured, capture_program
from fxpar.compile import compile_model
from fxpar.cost.cluster import parse_cluster
from fxpar.model_source import ModelSource
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Plan
from fxpar.plans.program import Program
from fxpar.prices import Prices
from fxpar.progress import silent

torch.set_num_threads(1)
VOCAB = 40


class Layer(nn.Module):
    """Attention and MLP with norms before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A language model of pre-norm layers."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def decoder_source(width: int = 32, heads: int = 4, layers: int = 2, batch: int = 8, length: int = 16) -> ModelSource:
    def inputs():
        return (torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0)),), {}

    return ModelSource(
        "decoder", lambda: Decoder(width, heads, layers), inputs, lambda output, _: output, torch.optim.AdamW,
        batch_dim=0,
    )


def mlp_source(width: int = 16, hidden: int = 24, layers: int = 2, batch: int = 8) -> ModelSource:
    def build():
        body = [m for _ in range(layers) for m in (nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))]
        return nn.Sequential(*body)

    def inputs():
        return (torch.randn(batch, width, generator=torch.Generator().manual_seed(0)),), {}

    return ModelSource("mlp", build, inputs, lambda output, _: output.square().mean(), torch.optim.AdamW, batch_dim=0)


@cache
def _captured(kind: str, precision: str, sizes: tuple[tuple[str, int], ...]) -> tuple[Captured, ModelSource]:
    source = {"decoder": decoder_source, "mlp": mlp_source}[kind](**dict(sizes))
    return capture_program(source, outputs=("loss",), precision=precision, progress=silent), source


def captured(kind: str, precision: str = "fp32", **sizes: int) -> tuple[Captured, ModelSource]:
    """What :func:`compile_model` takes to make several plans of one capture, and the model's source."""
    return _captured(kind, precision, tuple(sizes.items()))


def decoder_program(precision: str = "fp32", **sizes: int) -> Program:
    return _captured("decoder", precision, tuple(sizes.items()))[0][0]


def mlp_program(precision: str = "fp32", **sizes: int) -> Program:
    return _captured("mlp", precision, tuple(sizes.items()))[0][0]


@cache
def _plan(kind: str, precision: str, request: tuple[tuple[str, Any], ...]) -> Plan:
    captured, source = _captured(kind, precision, ())
    return compile_model(source, captured=captured, precision=precision, **dict(request)).plan


def mlp_plan(mesh: str | None = "2", precision: str = "fp32", **request: Any) -> Plan:
    return _plan("mlp", precision, (("mesh", mesh), *request.items()))


def decoder_plan(mesh: str | None = "2", precision: str = "fp32", **request: Any) -> Plan:
    return _plan("decoder", precision, (("mesh", mesh), *request.items()))


@cache
def prices(mesh: str, cluster: str | None = None) -> Prices:
    """Prices on a mesh of CPU ranks, or of the named cluster."""
    wanted = parse_mesh(mesh)
    return Prices(parse_cluster(cluster or str(wanted.world_size)), wanted)


def adamw(dtype: str, name: str) -> int:
    """Bytes of two moments per element of a float32 parameter."""
    return 8
