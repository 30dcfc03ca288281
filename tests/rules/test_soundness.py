"""Every declared rule, run choice by choice on a virtual mesh, reproduces its op."""

from __future__ import annotations

import zlib

import pytest
import torch

from fxpar import rule_examples  # noqa: F401  declares the generators
from fxpar.plans.mesh import parse_mesh
from fxpar.rule_examples.draw import GENERATORS, Draw
from fxpar.rule_examples.elementwise import short_name
from fxpar.rules.registry import all_rules
from fxpar.rules.soundness import check_call

torch.set_num_threads(1)
MESHES = tuple(parse_mesh(text) for text in ("2", "3", "2x2"))
OPS = sorted(short_name(rule.op) for rule in all_rules())


def counterexamples(op: str, rounds: int, limit: int) -> list[str]:
    """What the harness finds wrong with an op in ``rounds`` rounds of every generator."""
    found: list[str] = []
    base = zlib.crc32(op.encode()) % 100_000
    for number, generate in enumerate(GENERATORS[op]):
        for turn in range(rounds):
            draw = Draw(base + 1000 * number + turn)
            given = generate(draw)
            mesh = MESHES[turn % len(MESHES)]
            found += map(str, check_call(given, mesh, seed=turn, whole=turn % 4 == 3, limit=limit))
    return found


def test_every_rule_has_calls() -> None:
    assert not set(OPS) - set(GENERATORS), "rules without a generator of calls"
    assert not set(GENERATORS) - set(OPS), "generators without a rule"


@pytest.mark.parametrize("op", OPS)
def test_sound(op: str) -> None:
    found = counterexamples(op, rounds=6, limit=16)
    assert not found, "\n".join(found[:5])


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_sound_deeper(op: str) -> None:
    found = counterexamples(op, rounds=60, limit=60)
    assert not found, "\n".join(found[:5])
