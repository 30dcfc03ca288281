"""Small models with what real ones have: ties, frozen parameters, buffers, dropout, batch norm; and plans for them."""

import random

import torch
from torch import nn

from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Certificate, Fingerprint, Plan, Prediction
from tests.runtime.small_programs import random_decisions

VOCAB, WIDTH, BATCH, LENGTH = 10, 8, 4, 6


class Tied(nn.Module):
    """Token model: tied embedding and head, a frozen scale, a buffer that is read, a choice by a Python argument."""

    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.body = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width, bias=False))
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)
        self.register_buffer("shift", torch.linspace(0.0, 1.0, width))

    def forward(self, ids, labels=None, double=False):
        h = self.embed(ids) + self.shift
        h = self.norm(h + self.drop(self.body(h))) * self.scale
        logits = self.head(h * 2 if double else h)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Normed(nn.Module):
    """Batch norm: buffers are written in every step."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x)))).square().mean()


def tied(seed=0, **kwargs):
    torch.manual_seed(seed)
    return Tied(**kwargs).double()


def normed():
    torch.manual_seed(0)
    return Normed().double()


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator) for k in ("ids", "labels")}


def captured(model, args, kwargs, outputs="all"):
    # here: a rank that runs a plan imports nothing of this
    from fxpar.capture import capture
    from fxpar.hubs import insert_hubs
    from fxpar.logical_dims import analyse

    return analyse(insert_hubs(capture(model, args, kwargs, outputs=outputs)))


def random_plan(program, mesh, seed, recompute=False, modules=()):
    """A plan with random decisions; its figures say nothing."""
    decisions = random_decisions(program, parse_mesh(mesh), random.Random(seed), recompute=recompute, sayable=True)
    nothing = Prediction(0, 0, 0, 0, 0, 0, 0, 0, 0, ())
    return Plan(
        program, decisions, "cpu", 0, nothing, (), Certificate("random", 0, 0, 1.0),
        Fingerprint("", "", "", "", tuple(modules)),
    )
