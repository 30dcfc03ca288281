"""Canonical text: equal for equal plans, different when anything differs, and diffs that show what."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.plans.codec import decode, encode
from fxpar.plans.layout import Shard
from fxpar.plans.plan import Plan
from fxpar.plans.text import canonical_text, diff_text, text_lines
from tests.compiled import decoder_plan, mlp_plan
from tests.plans.draw import plans

replace = msgspec.structs.replace


@settings(max_examples=60)
@given(plans())
def test_the_same_plan_has_the_same_text(plan: Plan):
    again = decode(encode(plan))
    assert canonical_text(again) == canonical_text(plan)
    assert diff_text(plan, again, "a", "b") == ""
    assert canonical_text(plan).endswith("\n")


def test_one_choice_is_one_line():
    plan = mlp_plan("2x2")
    old = plan.decisions.choices[5]
    for index in range(len(plan.decisions.choices)):
        names = ("f0", ".") if plan.decisions.choices[index] != ("f0", ".") else (".", "f0")
        choices = (*plan.decisions.choices[:index], names, *plan.decisions.choices[index + 1 :])
        other = replace(plan, decisions=replace(plan.decisions, choices=choices))
        lines = diff_text(plan, other, "old", "new").splitlines()
        assert lines[:2] == ["--- old", "+++ new"]
        changed = [x for x in lines[2:] if x[:1] in "+-"]
        assert len(changed) == 2 and f"[{' '.join(names)}]" in changed[1], old


@settings(max_examples=80)
@given(st.data())
def test_any_other_field_shows(data):
    """Every number and text of the plan's parts is in its canonical text."""
    plan = decoder_plan("dp=2,tp=2")
    p, d = plan.program, plan.decisions
    node = data.draw(st.integers(0, len(p.nodes) - 1))
    item = data.draw(st.integers(0, len(p.inputs) - 1))
    changes = {
        "mesh": lambda: replace(plan, decisions=replace(d, mesh=mlp_plan("2x2").decisions.mesh)),
        "stored": lambda: replace(plan, decisions=replace(d, inputs=_put(d.inputs, item, (Shard(9), Shard(8))))),
        "left": lambda: replace(plan, decisions=replace(d, outputs=_put(d.outputs, 0, (Shard(9), Shard(8))))),
        "again": lambda: replace(plan, decisions=replace(d, recompute=(node,))),
        "op": lambda: replace(plan, program=replace(p, nodes=_put(p.nodes, node, replace(p.nodes[node], op="x")))),
        "args": lambda: replace(plan, program=replace(p, nodes=_put(p.nodes, node, replace(p.nodes[node], args=(9,))))),
        "phase": lambda: replace(plan, program=replace(p, nodes=_put(p.nodes, node, replace(
            p.nodes[node], phase="backward" if p.nodes[node].phase == "forward" else "forward")))),
        "source": lambda: replace(plan, program=replace(p, nodes=_put(p.nodes, node, replace(
            p.nodes[node], source="elsewhere")))),
        "trained": lambda: replace(plan, program=replace(p, inputs=_put(p.inputs, item, replace(
            p.inputs[item], requires_grad=not p.inputs[item].requires_grad)))),
        "persistent": lambda: replace(plan, program=replace(p, inputs=_put(p.inputs, item, replace(
            p.inputs[item], persistent=False)))),
        "ties": lambda: replace(plan, program=replace(p, inputs=_put(p.inputs, item, replace(
            p.inputs[item], ties=("other",))))),
        "structure": lambda: replace(plan, program=replace(p, structure=("const", 1))),
        "call": lambda: replace(plan, program=replace(p, call=("other",))),
        "baked": lambda: replace(plan, program=replace(p, baked=(("k", "1"),))),
        "cluster": lambda: replace(plan, cluster="other"),
        "memory": lambda: replace(plan, memory_bytes=1),
        "reserve": lambda: replace(plan, reserve_bytes=plan.reserve_bytes + 1),
        "time": lambda: replace(plan, prediction=replace(plan.prediction, step_ns=1)),
        "candidates": lambda: replace(plan, candidates=plan.candidates[:-1]),
        "certificate": lambda: replace(plan, certificate=replace(plan.certificate, gap=0.123)),
        "rules": lambda: replace(plan, fingerprint=replace(plan.fingerprint, rules="x")),
        "modules": lambda: replace(plan, fingerprint=replace(plan.fingerprint, modules=(("c", "0"),))),
        "provenance": lambda: replace(plan, provenance=(("k", "v"),)),
    }
    what = data.draw(st.sampled_from(sorted(changes)))
    other = changes[what]()
    assert other != plan
    assert canonical_text(other) != canonical_text(plan), what


def _put(row, index, item):
    return (*row[:index], item, *row[index + 1 :])


def test_values_read_like_a_program():
    lines = list(text_lines(mlp_plan("dp=2,tp=2")))
    assert lines[0] == "mesh dp=2,tp=2"
    assert any("= parameter 0.weight float32[24, 16] stored [R, S(" in x and x.endswith("trained") for x in lines)
    assert any("= aten.addmm.default(v1, v8, v10, 1, 1) [f0 " in x and "] forward  #" in x for x in lines)
    assert any(x.startswith("loss ") and x.endswith("[R, R]") for x in lines)
