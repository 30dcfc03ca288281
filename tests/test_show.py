"""What `fxpar show` prints is what the plan holds."""

import json

import msgspec
import pytest
import torch

from fxpar.plans.text import canonical_text
from fxpar.show import (
    certificate_facts,
    certificate_lines,
    gib,
    memory_price,
    ms,
    parameter_layouts,
    plan_facts,
    plan_text,
    reasons,
    size,
    split_work,
    table,
)
from tests.compiled import decoder_plan, mlp_plan

torch.set_num_threads(1)
replace = msgspec.structs.replace


@pytest.mark.parametrize(("value", "text"), [(0, "0.0 us"), (999_999, "1000.0 us"), (1_000_000, "1.00 ms"),
                                             (2_345_678_901, "2.35 s"), (-1_500_000, "-1.50 ms")])
def test_times(value, text):
    assert ms(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**20, "3.0 MiB"),
                                             (2**30, "1.00 GiB"), (2**27, "0.12 GiB"), (2**26, "64.0 MiB")])
def test_bytes(value, text):
    assert gib(value) == text
    assert size(5 * 2**30) == "5.0 GiB"


def test_tables_are_aligned():
    assert table([("a", "bbb"), ("cccc", "d")]) == ["  a     bbb", "  cccc  d"]
    assert table([]) == []


@pytest.mark.parametrize("make", [mlp_plan, decoder_plan])
@pytest.mark.parametrize("mesh", ["2", "dp=2,tp=2"])
def test_the_report_has_every_part(make, mesh):
    plan = make(mesh)
    text = plan_text(plan)
    p = plan.prediction
    assert f"mesh {plan.decisions.mesh} " in text and ms(p.step_ns) in text and "simulated" in text
    for c in p.collectives:
        assert c.kind in text
    for candidate in plan.candidates:
        assert candidate.name in text
    assert plan.certificate.status in text
    assert canonical_text(plan).rstrip() in plan_text(plan, full=True) and canonical_text(plan) not in text
    assert all(len(line) < 400 for line in text.splitlines())


def test_facts_are_json_and_complete():
    plan = decoder_plan("dp=2,tp=2")
    facts = json.loads(json.dumps(plan_facts(plan)))
    assert facts["mesh"] == {"dp": 2, "tp": 2} and facts["model"] == "decoder"
    assert facts["prediction"]["step_ns"] == plan.prediction.step_ns and facts["prediction"]["label"] == "simulated"
    assert [c["name"] for c in facts["candidates"]] == [c.name for c in plan.candidates]
    assert facts["certificate"]["bound_ns"] == plan.certificate.bound_ns
    assert sum(row["count"] for row in facts["parameters"]) == sum(p.kind == "parameter" for p in plan.program.inputs)
    assert facts["nodes"] == len(plan.program.nodes)


def test_the_certificate_says_what_memory_is_worth_and_what_no_overlap_beats():
    c = decoder_plan("2").certificate
    facts = plan_facts(decoder_plan("2"))["certificate"]
    assert facts["can_be_checked"] and not facts["memory_binds"] and facts["memory_price_ns_per_gib"] == 0
    assert facts["any_overlap_bound_ns"] == c.overlap.bound_ns
    text = "\n".join(certificate_lines(c))
    assert "memory does not bind" in text and ms(c.overlap.bound_ns) in text and "check --certificate" in text
    # 1 ns per 64 KiB unit is 2^14 ns per GiB
    bound = replace(c, cost_ns=c.bound_ns + 1_000_000, status="feasible", proof=replace(c.proof, multiplier=(1000, 1)))
    assert memory_price(bound) == 1000 * 2**14
    assert "+1 GiB per device would save at most 17.38 ms (16.38 ms and the gap)" in "\n".join(certificate_lines(bound))
    old = replace(c, proof=None, question=None, overlap=None)
    assert len(certificate_lines(old)) == 1 and certificate_facts(old)["memory_binds"] is None


def test_layers_are_counted_together():
    counted = parameter_layouts(decoder_plan("dp=2,tp=2"))
    assert counted["layers.*.up.weight", "[R, S(0)]"] + counted["layers.*.up.weight", "[R, S(1)]"] == 2
    assert sum(split_work(decoder_plan("dp=2,tp=2")).values()) == 11


def test_reasons_say_where_the_time_goes():
    plan = decoder_plan("2")
    lines = reasons(plan)
    assert len(lines) == len(plan.candidates) - 1
    for line, candidate in zip(lines, plan.candidates[1:], strict=True):
        assert line.startswith(candidate.name) and ("longer" in line or "as fast" in line)
    tight = replace(plan, candidates=tuple(replace(c, fits=i == 0) for i, c in enumerate(plan.candidates)),
                    memory_bytes=0)
    assert all("does not fit by" in line for line in reasons(tight))
    assert plan_text(tight).count("does not fit") >= 2 * len(lines)
    unknown = replace(plan, candidates=(plan.candidates[0], replace(plan.candidates[1], prediction=None, note="why")))
    assert reasons(unknown) == [] and "why" in plan_text(unknown)
    assert "plans compared" not in plan_text(replace(plan, candidates=()))


def test_a_plan_of_nothing_is_shown_too():
    """Figures of zero, as in plans made for tests."""
    plan = mlp_plan("2")
    bare = replace(plan, prediction=replace(plan.prediction, step_ns=0, compute_ns=0, exposed_ns=0))
    assert plan_text(bare)


def test_a_damaged_plan_is_shown_with_what_is_wrong():
    plan = mlp_plan("2")
    at = next(i for i, n in enumerate(plan.program.nodes) if n.op == "aten.addmm.default")
    nodes = list(plan.program.nodes)
    nodes[at] = replace(nodes[at], args=())
    damaged = replace(plan, program=replace(plan.program, nodes=tuple(nodes)))
    assert "does not fit the op's rule" in plan_text(damaged)
    choices = (*plan.decisions.choices[:at], ("f77",), *plan.decisions.choices[at + 1 :])
    unknown = replace(plan, decisions=replace(plan.decisions, choices=choices))
    assert "(f77) does not fit" in plan_text(unknown)
