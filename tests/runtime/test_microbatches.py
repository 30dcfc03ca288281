"""A loaded plan of several microbatches behaves as any other: step, loss.backward(), outputs, without gradients."""

import torch

from fxpar.capture import capture
from fxpar.hubs import insert_hubs
from fxpar.logical_dims import analyse
from fxpar.microbatches import split_in_time
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Certificate, Fingerprint, Plan, Prediction
from fxpar.random_plan import random_decisions
from fxpar.runtime.model import load
from tests.runtime.ranks import run_ranks
from tests.runtime.tiny_models import tied, tokens


def plan_of(count: int, mesh: str, seed: int) -> Plan:
    batch = tokens()
    program = analyse(insert_hubs(capture(tied(), (), batch, loss=lambda out, _: out["loss"], outputs="all")))
    program = split_in_time(program, count)
    prediction = Prediction(*[0] * 9, collectives=())
    return Plan(program, random_decisions(program, parse_mesh(mesh), seed), "2", 0, prediction, (),
                Certificate("random", 0, 0, 1.0), Fingerprint("", "", "", "", ()))


def behave(rank, plan):
    model, batch, found = load(plan, tied()), tokens(), {}
    found["step"] = model.step(**batch)
    gradients = [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    out = model(**batch)
    (out["loss"] * 3).backward()
    again = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    found["tripled"] = all(torch.allclose(3 * a, b, rtol=1e-12) for a, b in zip(gradients, again, strict=True))
    model.step(**batch, scale=0.5)
    added = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    found["added"] = all(torch.allclose(3.5 * a, b, rtol=1e-12) for a, b in zip(gradients, added, strict=True))
    found["gradients"], found["logits"] = gradients, out["logits"].detach()
    with torch.no_grad():
        quiet = model(**batch)
    found["quiet"] = quiet["loss"], quiet["loss"].requires_grad, quiet["logits"]
    found["norm"] = model.clip_grad_norm_(1.0)
    return found


def test_behaviour_on_two_ranks():
    model, batch = tied(), tokens()
    out = model(**batch)
    out["loss"].backward()
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    for found in run_ranks(behave, 2, plan_of(2, "2", 3)):
        if isinstance(found, BaseException):
            raise found
        torch.testing.assert_close(found["step"], out["loss"].detach(), rtol=1e-12, atol=0)
        for got, want in zip(found["gradients"], wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(found["logits"], out["logits"].detach())
        assert found["tripled"] and found["added"]
        loss, differentiable, logits = found["quiet"]
        torch.testing.assert_close(loss, found["step"])
        torch.testing.assert_close(logits, found["logits"])
        assert not differentiable
        norm = 3.5 * torch.cat([g.reshape(-1) for g in wanted]).norm()
        torch.testing.assert_close(found["norm"], norm, rtol=1e-9, atol=0)
