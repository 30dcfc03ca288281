"""What the alternatives of an op or a parameter are said to cost is what they cost."""

import json

import msgspec
import pytest

from fxpar.cli.main import main
from fxpar.explain import explain, prices_here
from fxpar.plan_names import find
from fxpar.plans.codec import encode
from fxpar.plans.errors import FxparError
from fxpar.priced_problem import formulate_again
from fxpar.splits import named_dims
from fxpar.state_words import state_words
from tests.compiled import decoder_plan, decoder_program, mlp_plan

replace = msgspec.structs.replace


def test_the_price_here_is_the_difference_in_the_cost_of_the_plan():
    plan = mlp_plan("2x2")
    formulation = formulate_again(plan)[0]
    problem, assignment = formulation.problem, list(formulation.assignment(plan.decisions))
    for c in range(len(problem.variables)):
        here, _ = prices_here(problem, assignment, c)
        for state, price in enumerate(here):
            moved = [state if v == c else s for v, s in enumerate(assignment)]
            cost = problem.cost(moved)
            assert (cost is None) == (price is None)
            if price is not None:
                assert cost - plan.certificate.cost_ns == price - here[assignment[c]]


def test_a_parameter_and_an_op_are_explained_from_the_plan_alone():
    plan = mlp_plan("2x2")
    for name, words in (("0.weight", "cut over"), ("0", "over a"), ("relu", "whole on a0")):
        found = explain(plan, name, shown=2)
        group = found.groups[0]
        chosen, *others = group.alternatives
        assert chosen.chosen and chosen.plan_ns is None and not any(a.chosen for a in others) and len(others) <= 2
        assert any(words in a.words for a in group.alternatives), found.text()
        for a in others:
            # nothing beats the plan, which is proven optimal, and a forced plan is never better than its bound
            assert a.possible and a.bound_ns <= a.plan_ns and a.plan_ns >= plan.certificate.bound_ns
            assert a.here_ns is None or a.plan_ns <= plan.certificate.cost_ns + a.here_ns - chosen.here_ns
        text = found.text()
        assert "chosen" in text and "whole plan with it" in text and group.title in text
        assert json.loads(json.dumps(found.as_dict()))["groups"][0]["alternatives"][0]["chosen"]


def test_recomputation_is_among_the_alternatives_where_it_was_free():
    plan = decoder_plan("2", memory=900_000)
    formulation = formulate_again(plan)[0]
    words = state_words(formulation, named_dims(plan.program, 0))
    up = next(n for n, node in enumerate(plan.program.nodes) if node.module == "layers.1.up" and "mm" in node.op)
    states = words(formulation.classes.nodes[up])
    assert "batch over a0; kept" in states and "ffn over a0; run again in backward" in states
    assert len(set(states)) == len(states)
    found = explain(plan, "layers.1.up", shown=2)
    assert found.groups[0].members == 2 and found.more  # views, the transpose, the ops of backward
    assert all(a.possible for a in found.groups[0].alternatives)


def test_names():
    program = decoder_program()
    assert [f.title for f in find(program, "layers.0.up.weight")] == ["parameter layers.0.up.weight"]
    assert len(find(program, "layers.*.up.weight")) == 2 and not find(program, "3")[0].title.startswith("param")
    assert {f.index for f in find(program, "mm")} == {f.index for f in find(program, "aten.mm.default")} != set()
    modules = [program.nodes[f.index].module for f in find(program, "layers.0.up")]
    assert modules and set(modules) == {"layers.0.up"}


@pytest.mark.parametrize(
    ("name", "near"),
    [("layers.0.upp", "layers.0.up"), ("aten.addm.default", "aten.addmm.default"), ("weight", ".weight")],
)
def test_unknown_names_list_near_ones(name, near):
    with pytest.raises(FxparError, match="no op or parameter is called") as caught:
        find(decoder_program(), name)
    assert near in caught.value.numbers[0] and "fxpar show --full" in caught.value.way_out


def test_an_index_beyond_the_last():
    with pytest.raises(FxparError, match="there is no op 99999"):
        find(decoder_program(), "99999")
    with pytest.raises(FxparError, match="no op or parameter is called"):
        find(decoder_program(), "")


def test_plans_that_cannot_be_explained_say_why():
    with pytest.raises(FxparError, match="which problem it answers"):
        explain(mlp_plan("2", random_choices=3), "mm")
    plan = mlp_plan("2x2")
    names = ("f9", ".")
    damaged = replace(plan, decisions=replace(plan.decisions, choices=(names, *plan.decisions.choices[1:])))
    with pytest.raises(FxparError, match="not among those of its problem"):
        explain(damaged, "0.weight")


def test_the_command(tmp_path, capsys):
    path = tmp_path / "plan.msgpack"
    path.write_bytes(encode(mlp_plan("2x2")))
    assert main(["explain", str(path), "0.weight", "--alternatives", "1"]) == 0
    assert "parameter 0.weight" in capsys.readouterr().out
    assert main(["explain", str(path), "0.weight", "--alternatives", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"][0]["name"] == "parameter 0.weight"
    assert main(["explain", str(path), "0.weigth"]) == 1
    assert "near: 0.weight" in capsys.readouterr().err
