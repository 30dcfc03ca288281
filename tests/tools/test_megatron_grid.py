"""The plan chosen with nothing asked is no slower than any plan of the grid that people would try."""

from pathlib import Path

import msgspec
import pytest

from fxpar.outer import Shape
from tools import megatron_grid as grids

TINY = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 4, "n_head": 4,
        "n_positions": 64, "vocab_size": 256, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip


@pytest.mark.parametrize("name", grids.CASES)
def test_the_grid_has_two_hundred_configurations_that_exist(name):
    case = grids.CASES[name]
    world = grids.parse_cluster(case.cluster).world_size
    found = list(grids.grid(world, case.batch))
    assert len(set(found)) == len(found) and sum(p.schedules for p in found) >= 200
    for placed in found:
        s = placed.shape
        assert s.pp * s.dp * s.tp == world and case.batch % (s.dp * s.microbatches) == 0


@pytest.mark.timeout(300)
def test_no_configuration_of_a_small_grid_is_faster(tmp_path, monkeypatch):
    monkeypatch.setattr(grids, "TENSOR", (1, 2))
    monkeypatch.setattr(grids, "STAGES", (1, 2))
    monkeypatch.setattr(grids, "SAMPLES", (1, 2))
    monkeypatch.setattr(grids, "AGAIN", ("auto",))
    case = grids.Case(TINY, "causal-lm", 8, 64, "1x4:a100")
    plan, seconds, results = grids.compared(grids.source_of(case, tmp_path), case.cluster, "bf16")
    assert seconds > 0 and len(results) > 8
    assert any(r.step_ns is not None and r.placed.shape.pp == 2 for r in results)
    assert not grids.faster(plan, results)
    replace = msgspec.structs.replace
    slow = replace(plan, prediction=replace(plan.prediction, step_ns=2**62))
    assert len(grids.faster(slow, results)) == sum(r.step_ns is not None for r in results)


def test_what_a_rank_holds_at_least():
    ready = grids.Opened(None, None, None, 1000)

    def least(zero, microbatches):
        return ready.least_bytes(grids.Placed(Shape(1, 4, 1, microbatches), zero, "on"))

    assert least(0, 1) == 18_000  # float32 and two moments, gradients, bfloat16 copies
    assert least(1, 1) == 1000 * (3 + 1 + 2) and least(1, 2) == 1000 * (3 + 4 + 2)
    assert least(3, 2) == 1000 * (3 + 1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", grids.CASES)
def test_no_configuration_is_faster_than_the_choice(name, tmp_path):
    case = grids.CASES[name]
    plan, seconds, results = grids.compared(grids.source_of(case, Path(tmp_path)), case.cluster, "bf16")
    assert not grids.faster(plan, results)
