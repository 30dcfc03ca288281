"""A loaded model trains like the plain one, on real ranks, under whatever plan."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from fxpar.plans.errors import FxparError, PlanMismatch
from fxpar.runtime.model import ParallelModule, load
from tests.runtime.ranks import run_ranks, values
from tests.runtime.tiny_models import captured, normed, random_plan, tied, tokens

STEPS = 3


def full(state):
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}


def train_plain():
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(**tokens(step))["loss"]
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, norms, full(model.state_dict())


def train_loaded(rank, plans):
    """Every plan for a few steps, by ``step`` and by ``loss.backward()`` in turn."""
    found = []
    for plan in plans:
        model = load(plan, tied())
        assert isinstance(model, ParallelModule) and isinstance(model, type(tied()))
        assert model.head.weight is model.embed.weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses, norms = [], []
        for step in range(STEPS):
            if step % 2:
                loss = model.step(**tokens(step))
            else:
                out = model(tokens(step)["ids"], labels=tokens(step)["labels"])
                loss = out["loss"]
                loss.backward()
                loss = loss.detach()
            norms.append(model.clip_grad_norm_(0.1))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        found.append((losses, norms, full(model.state_dict())))
    return found


@pytest.mark.parametrize(("mesh", "world"), [("2", 2), ("2x2", 4)])
def test_training_is_that_of_one_device(mesh, world):
    program = captured(tied(), (), tokens())
    plans = [random_plan(program, mesh, seed, recompute=seed % 2 == 0) for seed in range(8 // world)]
    expected = train_plain()
    for found in values(run_ranks(train_loaded, world, plans)):
        for one in found:
            torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)


def behave(rank, plan, dropout_plan, norm_plan):
    """Everything that needs ranks but not a process start of its own."""
    found = {}
    model = load(plan, tied(seed=rank))  # other values on rank 1: rank 0's are taken
    found["weights"] = full(model.state_dict())
    batch = tokens()

    model.step(**batch)
    once = model.norm.weight.grad.full_tensor().clone()
    assert model.scale.grad is None
    model.step(**batch, scale=2.0)
    found["accumulated"] = torch.allclose(model.norm.weight.grad.full_tensor(), 3 * once)

    out = model(**batch)
    found["logits"] = full(out)["logits"].detach()
    out["loss"].backward()
    for name, call in {
        "twice": lambda: out["loss"].backward(),
        "shape": lambda: model(ids=batch["ids"][:2], labels=batch["labels"]),
        "dtype": lambda: model(ids=batch["ids"].int(), labels=batch["labels"]),
        "missing": lambda: model(ids=batch["ids"]),
        "extra": lambda: model(**batch, mask=batch["ids"]),
        "baked": lambda: model(**batch, double=True),
        "positional": lambda: model(1, 2, 3, 4),
        "again": lambda: load(plan, model),
    }.items():
        with pytest.raises(FxparError) as error:
            call()
            raise AssertionError(name)
        found[name] = str(error.value)

    changed = model(**batch)["loss"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    with pytest.raises(FxparError) as error:
        changed.backward()
    found["changed"] = str(error.value)
    with torch.no_grad():
        found["no_grad"] = model(**batch)["loss"].requires_grad
    model.eval()
    found["eval"] = model(**batch)["loss"].isfinite().item()

    random = load(dropout_plan, tied(dropout=0.5))
    random.seed(7)
    first, second = random.step(**batch), random.step(**batch)
    random.seed(7)
    found["seeds"] = (first == random.step(**batch)).item(), (first == second).item()
    random.eval()
    with pytest.raises(FxparError) as error:
        random(**batch)
    found["eval dropout"] = str(error.value)

    bn = load(norm_plan, normed())
    x = torch.arange(30.0, dtype=torch.float64).reshape(6, 5).sin()
    found["bn loss"] = bn.step(x), bn.step(x)
    found["bn"] = full(bn.state_dict())
    return found


def test_behaviour_on_two_ranks():
    program = captured(tied(), (), tokens())
    dropout = captured(tied(dropout=0.5), (), tokens())
    x = torch.arange(30.0, dtype=torch.float64).reshape(6, 5).sin()
    norm = captured(normed(), (x,), {})
    plans = [random_plan(p, "2", 3) for p in (program, dropout, norm)]
    for found in values(run_ranks(behave, 2, *plans)):
        torch.testing.assert_close(found["weights"], dict(tied().state_dict()))
        plain = tied()
        torch.testing.assert_close(found["logits"], plain(**tokens())["logits"].detach())
        assert found["accumulated"]
        assert "second time" in found["twice"]
        assert "[2, 6] int64, the plan expects [4, 6] int64" in found["shape"]
        assert "[4, 6] int32" in found["dtype"]
        assert "labels is missing" in found["missing"]
        assert "no input mask" in found["extra"]
        assert "double is True" in found["baked"]
        assert "3 positional arguments, got 4" in found["positional"]
        assert "loaded already" in found["again"]
        assert "changed in place" in found["changed"]
        assert found["no_grad"] is False and found["eval"] is True
        assert found["seeds"] == (True, False)
        assert "dropout" in found["eval dropout"]
        bn = normed()
        for want in found["bn loss"]:
            torch.testing.assert_close(want, bn(x).detach())
        torch.testing.assert_close(found["bn"], dict(bn.state_dict()))


def refuse(rank, plan, other):
    found = []
    for chosen, model in [
        (plan, tied(width=16) if rank else tied()),  # another model on rank 1 only
        (plan if rank else other, tied()),  # another plan on rank 0 only
    ]:
        with pytest.raises(PlanMismatch) as error:
            load(chosen, model)
        found.append(str(error.value))
    return found


def test_ranks_that_disagree_all_stop():
    program = captured(tied(), (), tokens())
    plans = [random_plan(program, "2", seed) for seed in (1, 2)]
    good, bad = values(run_ranks(refuse, 2, *plans))
    assert "rank 1 cannot load the plan" in good[0] and "embed.weight has shape [10, 16]" in good[0]
    assert "embed.weight has shape [10, 16], in the plan [10, 8]" in bad[0] and "norm.bias" in bad[0]
    assert "another plan than rank 0" in good[1] and good[1] == bad[1]


def one_fails(rank, plan):
    model = load(plan, tied())
    batch = tokens()
    model.step(**batch)
    if rank == 1:
        raise ValueError("rank 1 gives up")
    while True:  # rank 0 must get out within seconds
        model.step(**batch)


def test_a_rank_that_dies_stops_the_others():
    program = captured(tied(), (), tokens())
    plan = next(p for p in (random_plan(program, "2", s) for s in range(20)) if any(map(str, p.decisions.choices)))
    survivor, dead = run_ranks(one_fails, 2, plan, timeout=30)
    assert isinstance(dead, ValueError)
    assert isinstance(survivor, FxparError) and "another rank has stopped" in str(survivor)
