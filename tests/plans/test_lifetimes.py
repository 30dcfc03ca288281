"""Copies kept from forward to backward: which hubs may, and what is refused by name."""

import msgspec
import pytest

from fxpar.plans.check import check_plan, plan_problems
from fxpar.plans.codec import decode, encode
from fxpar.plans.errors import PlanFileError
from fxpar.plans.lifetimes import HUB, hub_partners, keep_copies
from fxpar.plans.plan import Plan
from fxpar.plans.program import node_inputs
from fxpar.plans.text import canonical_text
from tests.compiled import mlp_plan

replace = msgspec.structs.replace


def plain() -> Plan:
    """A plan that keeps no copy."""
    plan = mlp_plan("2")
    return replace(plan, decisions=replace(plan.decisions, reuse=()))


def with_decisions(**changes: object) -> Plan:
    plan = plain()
    return replace(plan, decisions=replace(plan.decisions, **changes))


def test_partners_read_the_same_value_one_in_each_half():
    program = mlp_plan("2").program
    partners = hub_partners(program)
    assert partners
    for late, early in partners.items():
        nodes = program.nodes[late], program.nodes[early]
        assert [n.op for n in nodes] == [HUB, HUB] and [n.phase for n in nodes] == ["backward", "forward"]
        assert node_inputs(nodes[0]) == node_inputs(nodes[1])


def test_kept_copies_travel_in_the_file_and_stand_in_the_text():
    plan = plain()
    hubs = list(hub_partners(plan.program))
    kept = replace(plan, decisions=keep_copies(plan.program, plan.decisions, hubs[:2]))
    assert kept.decisions.reuse == tuple(hubs[:2]) and not list(plan_problems(kept))
    assert decode(encode(kept)) == kept and encode(kept) != encode(plan)
    assert canonical_text(kept).count("kept from forward") == 2 and "kept from forward" not in canonical_text(plan)


def test_what_cannot_be_kept_is_refused():
    plan = plain()
    program, choices = plan.program, plan.decisions.choices
    late, early = next(iter(hub_partners(program).items()))
    other = next(n for n, node in enumerate(program.nodes) if node.phase == "backward" and node.op != HUB)
    cut = next(name for name in (("f0",), ("f1",), (".",)) if name != choices[early])
    cases = {
        "names node -1 of": {"reuse": (-1,)},
        f"names node {len(program.nodes)} of": {"reuse": (len(program.nodes),)},
        "is no backward hub": {"reuse": (early,)},
        f"node {other} (": {"reuse": (other,)},
        "not in order, or names a node twice": {"reuse": (late, late)},
        "which is laid out": {"reuse": (late,), "choices": tuple(
            cut if n == late else choices[early] if n == early else c for n, c in enumerate(choices))},
        f"recompute names node {early}": {"reuse": (late,), "recompute": (early,), "choices": tuple(
            choices[early] if n == late else c for n, c in enumerate(choices))},
    }
    for words, changes in cases.items():
        with pytest.raises(PlanFileError, match="not consistent") as caught:
            check_plan(with_decisions(**changes), where="here")
        assert words in " ".join(caught.value.numbers) and caught.value.way_out


def test_a_plan_of_an_older_format_is_refused_by_name():
    import hashlib

    import msgpack

    from fxpar.plans.codec import MAGIC

    payload = msgpack.packb({})
    data = msgpack.packb([MAGIC, 1, hashlib.sha256(payload).digest(), payload])
    with pytest.raises(PlanFileError, match="plan format 1 is not known") as caught:
        decode(data, where="old.fxplan")
    assert "formats 2, 3" in caught.value.numbers[0] and "compile the plan again" in caught.value.way_out
