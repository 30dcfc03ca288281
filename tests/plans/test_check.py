"""Plans that contradict themselves are refused, with what is wrong; those made by the compiler are not."""

from typing import Any

import msgspec
import pytest

from fxpar.plans.check import check_plan, plan_problems
from fxpar.plans.errors import PlanFileError
from fxpar.plans.layout import Partial, Replicate, Shard
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.plan import Overlap, Plan, Proof, Question
from fxpar.plans.program import Constant, Input, Ref, TensorType
from tests.compiled import decoder_plan, mlp_plan

replace = msgspec.structs.replace


def with_program(**changes: Any) -> Plan:
    plan = mlp_plan("2")
    return replace(plan, program=replace(plan.program, **changes))


def with_decisions(**changes: Any) -> Plan:
    plan = mlp_plan("2")
    return replace(plan, decisions=replace(plan.decisions, **changes))


def with_item(field: str, index: int, item: Any) -> Plan:
    """The plan with one item of a tuple of its program replaced."""
    row = list(getattr(mlp_plan("2").program, field))
    row[index] = item
    return with_program(**{field: tuple(row)})


def refused(plan: Plan, words: str) -> None:
    with pytest.raises(PlanFileError, match="not consistent") as caught:
        check_plan(plan, where="here")
    assert words in caught.value.numbers[0], caught.value.numbers
    assert caught.value.where == "here"


def test_compiled_plans_hold_together():
    for plan in (mlp_plan("2"), mlp_plan("2x2"), decoder_plan("2")):
        assert list(plan_problems(plan)) == []


@pytest.mark.parametrize("axes", [(), (("dp", 0),), (("dp", -2),), (("dp", 2**11), ("tp", 2**10)), (("dp", 2**70),)])
def test_meshes(axes):
    mesh = Mesh(tuple(Axis(*a) for a in axes))
    refused(with_decisions(mesh=mesh), "no ranks or more than")


def test_an_axis_named_twice():
    refused(replace(mlp_plan("2x2"), decisions=replace(
        mlp_plan("2x2").decisions, mesh=Mesh((Axis("a0", 2), Axis("a0", 2)))
    )), "twice")


def test_counts():
    decisions, program = mlp_plan("2").decisions, mlp_plan("2").program
    refused(with_decisions(choices=decisions.choices[1:]), "choices for")
    refused(with_decisions(choices=((".", "."), *decisions.choices[1:])), "2 choices for 1 mesh axes")
    refused(with_decisions(inputs=decisions.inputs[:-1]), "input layouts for")
    refused(with_decisions(outputs=(*decisions.outputs, (Replicate(),))), "output layouts for")
    refused(with_program(dims=program.dims[:-1]), "logical dims for")


def test_layouts():
    decisions = mlp_plan("2").decisions
    for bad in [(), (Replicate(), Replicate()), (Shard(7),), (Shard(-1),), (Shard(0, 5),), (Shard(0, 0, 0),)]:
        refused(with_decisions(inputs=(bad, *decisions.inputs[1:])), "does not fit")
        refused(with_decisions(outputs=(bad, *decisions.outputs[1:])), "does not fit")
    for pending in [(Partial("sum"),), (Partial("max"),)]:
        refused(with_decisions(inputs=(pending, *decisions.inputs[1:])), "pending")
        refused(with_decisions(outputs=(pending, *decisions.outputs[1:])), "pending")


def test_recomputation():
    program = mlp_plan("2").program
    late = next(i for i, n in enumerate(program.nodes) if n.phase == "backward")
    for index in (-1, len(program.nodes), late):
        refused(with_decisions(recompute=(index,)), "no forward node")


def test_values_are_defined_once_and_before_they_are_read():
    program = mlp_plan("2").program
    first, last = program.nodes[0], program.nodes[-1]
    refused(with_item("nodes", 0, replace(first, args=(Ref(last.outputs[0]),))), "before it is defined")
    refused(with_item("nodes", 0, replace(first, args=((((Ref(10**9),),),),))), "before it is defined")
    refused(with_item("nodes", 0, replace(first, args=(Ref(-1),))), "before it is defined")
    refused(with_item("nodes", -1, replace(last, outputs=first.outputs)), "again or out of range")
    refused(with_item("nodes", -1, replace(last, outputs=(10**9,))), "again or out of range")
    refused(with_item("nodes", -1, replace(last, outputs=(-2,))), "again or out of range")
    refused(with_item("inputs", 0, replace(program.inputs[0], value=-1)), "again or out of range")
    refused(with_item("inputs", 0, program.inputs[1]), "again or out of range")
    refused(with_item("outputs", 0, replace(program.outputs[0], value=10**9)), "nothing defines")


def test_a_result_that_is_not_made_cannot_be_read():
    first, second, *rest = mlp_plan("2").program.nodes
    absent = replace(first, outputs=(*first.outputs, -1))
    assert list(plan_problems(with_program(nodes=(absent, second, *rest)))) == []
    refused(with_program(nodes=(absent, replace(second, args=(Ref(-1),)), *rest)), "before it is defined")


def test_shapes():
    program = mlp_plan("2").program
    refused(with_item("types", 0, TensorType((-4,), "float32")), "has shape")
    refused(with_item("types", 0, TensorType((2**40, 2**40), "float32")), "has shape")
    refused(with_item("types", 0, TensorType((3,), "float32")), "has logical dims")
    refused(with_item("dims", 0, ((3,),)), "has logical dims")
    negative = tuple(tuple(-a for a in (*atoms, 1)) if i < 2 else atoms for i, atoms in enumerate(program.dims[0]))
    refused(with_item("dims", 0, negative), "has logical dims")


def test_dtypes():
    for name in ["float33", "load", "float32\n", "__import__('os')"]:
        refused(with_item("types", 0, TensorType(mlp_plan("2").program.types[0].shape, name)), "dtype")


def test_outputs():
    program = mlp_plan("2").program
    loss, gradient = program.outputs[0], next(o for o in program.outputs if o.kind == "gradient")
    position = program.outputs.index(gradient)
    assert loss.kind == "loss"
    refused(with_item("outputs", 0, replace(loss, kind="output")), "no single loss")
    refused(with_item("outputs", position, replace(loss)), "no single loss")
    refused(with_item("outputs", position, replace(gradient, name="nobody")), "gradient of nobody")
    refused(with_item("outputs", position, replace(gradient, kind="buffer")), "buffer of")
    refused(with_item("outputs", position, replace(gradient, value=loss.value)), "gradient of")


def test_names_are_given_once():
    program = mlp_plan("2").program
    a, b = [i for i in program.inputs if i.kind == "parameter"][:2]
    refused(with_item("inputs", program.inputs.index(b), replace(b, name=a.name)), "twice")
    refused(with_item("inputs", program.inputs.index(b), replace(b, ties=(a.name,))), "twice")


@pytest.mark.parametrize("name", ["0", "-1", "x", "\u00b2", "", "9" * 5000])
def test_constants_that_are_not_in_the_file(name):
    item = mlp_plan("2").program.inputs[0]
    refused(with_item("inputs", 0, Input(item.value, "constant", name)), "is not in the file")


def test_constants_hold_what_they_say():
    program = mlp_plan("2").program
    kind = program.types[program.inputs[0].value]
    plan = with_item("inputs", 0, Input(program.inputs[0].value, "constant", "0"))
    short = replace(plan, program=replace(plan.program, constants=(Constant(kind, b"123"),)))
    refused(short, "3 bytes")
    other = replace(plan, program=replace(plan.program, constants=(Constant(TensorType((1,), "uint8"), b"1"),)))
    refused(other, "constant 0")


def test_only_the_first_problems_are_told():
    program = mlp_plan("2").program
    gone = with_program(outputs=tuple(replace(o, value=10**9) for o in program.outputs))
    with pytest.raises(PlanFileError) as caught:
        check_plan(gone)
    assert caught.value.numbers[0].count(";") <= 4


def test_proofs_and_questions_that_mean_nothing():
    plan = mlp_plan("2")
    proof = Proof(1, (1, 1), 1, ((0, 1),), (0, 0))
    question = Question(("",), False, None, False, 1, (0,) * len(plan.program.inputs), "", b"")
    good = replace(plan.certificate, question=question, proof=proof, overlap=Overlap(3, proof))
    assert not list(plan_problems(replace(plan, certificate=good)))
    negative = (-1,) * len(plan.program.inputs)
    for wrong, said in (
        (replace(good, question=replace(question, optimizer_bytes=(1,))), "optimizer bytes"),
        (replace(good, question=replace(question, optimizer_bytes=negative)), "optimizer bytes"),
        (replace(good, question=replace(question, roles=())), "0 roles for 1 mesh axes"),
        (replace(good, question=replace(question, budget_units=-1)), "budget is -1"),
        (replace(good, overlap=Overlap(5, proof)), "5 quarters"),
        (replace(good, proof=replace(proof, multiplier=(1, 0))), "multiplier (1, 0)"),
        (replace(good, proof=replace(proof, multiplier=(-1, 1))), "multiplier (-1, 1)"),
        (replace(good, overlap=Overlap(1, replace(proof, quantum_ns=0))), "quantum 0"),
        (replace(good, proof=replace(proof, links=(1,))), "not in the file"),
        (replace(good, proof=replace(proof, vectors=((),))), "empty payments"),
    ):
        assert said in "; ".join(plan_problems(replace(plan, certificate=wrong)))
