"""What is asked for beyond mesh and memory, seen in the plans; what cannot be met is named."""

import dataclasses
from functools import cache

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxpar.candidates import Request
from fxpar.certificate import certificate_findings
from fxpar.compile import compile_model
from fxpar.conflicts import Conflicts
from fxpar.constraints import apply, filters, read_constraints
from fxpar.pin_targets import matched
from fxpar.plans.codec import decode, encode
from fxpar.plans.errors import FxparError, Infeasible, PlanMismatch
from fxpar.plans.layout import REPLICATE, Partial, Shard
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Plan
from fxpar.plans.program import Program
from fxpar.progress import silent
from fxpar.restrict import roles_of
from fxpar.rules.choices import choice_by_names, site_of
from fxpar.splits import cut_factors, named_dims
from fxpar.stored import stored_layouts
from fxpar.verify import verify_plan
from tests.compiled import adamw, captured, decoder_program, mlp_program, prices

torch.set_num_threads(1)
KIB = 1024


def captured_of(kind: str):
    """Also ``"wide"``: an mlp whose memory is that of its parameters."""
    return captured("mlp", width=256, hidden=512) if kind == "wide" else captured(kind)


@cache
def _plan(kind: str, mesh: str, request: tuple) -> Plan:
    taken, source = captured_of(kind)
    return compile_model(source, mesh=mesh, captured=taken, **dict(request)).plan


def plan_of(kind: str, mesh: str, *, hints=(), **request) -> Plan:
    """A plan made once per process, but with hints."""
    if hints:
        taken, source = captured_of(kind)
        return compile_model(source, mesh=mesh, captured=taken, hints=hints, **request).plan
    return _plan(kind, mesh, tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(request.items())))


def stored(plan: Plan) -> dict[str, tuple]:
    return {i.name: lay for i, lay in zip(plan.program.inputs, plan.decisions.inputs, strict=True)}


def obeys(plan: Plan, pins: tuple[str, ...], zero: int | None = None) -> bool:
    mesh = plan.decisions.mesh
    asked = apply(read_constraints(zero, pins), plan.program, mesh, named_dims(plan.program, 0))
    return asked.obeyed(plan.decisions)


def verified(plan: Plan) -> bool:
    found = list(certificate_findings(decode(encode(plan))))
    assert not [f for f in found if f.outcome == "problem"], found
    return {f.check: f.text for f in found}["bound"].startswith("verified")


# ZeRO


@pytest.mark.parametrize("mesh", ["2", "dp=2,tp=2"])
def test_zero_0_stores_every_parameter_whole_but_on_tp(mesh):
    plan = plan_of("decoder", mesh, zero=0)
    for item, layout in zip(plan.program.inputs, plan.decisions.inputs, strict=True):
        if item.kind == "parameter":
            assert all(p == REPLICATE for p, axis in zip(layout, plan.decisions.mesh.axes, strict=True)
                       if axis.name != "tp"), item.name
    assert plan.certificate.status == "pinned" and verified(plan)


@pytest.mark.parametrize("mesh", ["2", "dp=2,tp=2"])
def test_zero_3_cuts_every_parameter_but_on_tp(mesh):
    plan = plan_of("decoder", mesh, zero=3)
    for item, layout in zip(plan.program.inputs, plan.decisions.inputs, strict=True):
        if item.kind == "parameter":  # all of the decoder's have dims of 2 or more
            assert all(isinstance(p, Shard) for p, axis in zip(layout, plan.decisions.mesh.axes, strict=True)
                       if axis.name != "tp"), item.name
    whole = plan_of("decoder", mesh, zero=0)
    assert plan.prediction.optimizer_bytes < 0.6 * whole.prediction.optimizer_bytes
    assert plan.prediction.gradient_bytes < 0.6 * whole.prediction.gradient_bytes
    assert plan.certificate.status == "pinned" and verified(plan)


def test_a_pin_is_an_exception_from_the_stage():
    plan = plan_of("mlp", "2", zero=3, pins=["0.weight=R"])
    assert stored(plan)["0.weight"] == (REPLICATE,) and isinstance(stored(plan)["2.weight"][0], Shard)
    plan = plan_of("mlp", "2x2", zero=0, pins=["0.weight=a1:S(1)"])
    assert stored(plan)["0.weight"] == (REPLICATE, Shard(1)) and stored(plan)["2.weight"] == (REPLICATE, REPLICATE)


@pytest.mark.parametrize("mesh", ["2", "dp=2"])
def test_zero_2_keeps_the_copies_that_zero_3_gathers_again(mesh):
    kept, freed = plan_of("mlp", mesh, zero=2), plan_of("mlp", mesh, zero=3)
    assert freed.decisions.reuse == () and obeys(freed, (), 3)
    for plan in (kept, plan_of("mlp", mesh, zero=1)):
        assert obeys(plan, (), 2) and obeys(plan, (), 1) and verified(plan)
        for item, layout in zip(plan.program.inputs, plan.decisions.inputs, strict=True):
            assert item.kind != "parameter" or isinstance(layout[0], Shard)
    drawn = plan_of("mlp", mesh, zero=2, random_choices=1)
    assert drawn.decisions.reuse and not obeys(drawn, (), 3)
    bare = msgspec.structs.replace(drawn.decisions, reuse=())
    assert not obeys(msgspec.structs.replace(drawn, decisions=bare), (), 2)


def test_copies_are_kept_on_a_batch_that_is_worth_splitting():
    """Enough rows that parameters are gathered at all: each is gathered once, where ZeRO-3 gathers twice."""
    taken, source = captured("mlp", width=64, hidden=96, batch=4096)
    plans = {zero: compile_model(source, mesh="dp=2", captured=taken, zero=zero).plan for zero in (2, 3)}
    gathered = {zero: sum(c.count for c in plan.prediction.collectives if "gather" in c.kind)
                for zero, plan in plans.items()}
    assert plans[2].decisions.reuse and 0 < gathered[2] < gathered[3]
    assert verify_plan(plans[2], source).ok


def test_there_is_no_stage_4():
    with pytest.raises(FxparError, match="no ZeRO stage 4"):
        read_constraints(4, ())


# what patterns name


def names(program: Program, found) -> tuple[str, ...]:
    return tuple(f"{program.nodes[n].op.split('.')[1]} {program.nodes[n].module}" for n in found)


def test_inputs_come_first_then_modules_then_ops():
    program = decoder_program()
    assert [program.inputs[i].name for i in matched(program, "layers.*.up.weight").inputs] == [
        "layers.0.up.weight", "layers.1.up.weight"]
    assert [program.inputs[i].name for i in matched(program, "ids").inputs] == ["ids"]
    up = matched(program, "layers.*.up")
    assert names(program, up.computing) == ("addmm layers.0.up", "addmm layers.1.up")
    assert names(program, up.results) == ("view layers.0.up", "view layers.1.up")
    assert all(program.nodes[n].phase == "forward" for n in (*up.computing, *up.results))
    layers = matched(program, "layers.*/")  # without the slash it would name parameters
    assert names(program, layers.results) == ("add layers.0", "add layers.1")
    assert names(program, matched(program, "attention").computing) == ("attention layers.0", "attention layers.1")
    assert names(program, matched(program, "layers.1/addmm").computing) == tuple(
        f"addmm layers.1.{name}" for name in ("qkv", "out", "up", "down"))
    assert matched(program, "/addmm").computing == matched(program, "addmm").computing


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("embd.weight", "embed.weight"), ("layer.*.up", "layers.0.up"), ("layers.0/mm", "near"), ("atention", "attention"),
     ("gelu_backward", "gelu_backward"), ("", ""), ("/", "")],
)
def test_a_pattern_that_matches_nothing_names_near_ones(pattern, near):
    with pytest.raises(FxparError, match="no parameter, input, module or forward op is called") as caught:
        matched(decoder_program(), pattern)
    assert near in " ".join(caught.value.numbers)


# pins, seen in plans


def test_stored_placements_are_what_is_pinned():
    pins = ("embed.weight=a1:Shard(0)", "*.up.weight=[R, Shard(-1)]", "layers.*.qkv.weight=a0:heads", "ids=Replicate")
    plan = plan_of("decoder", "2x2", pins=pins)
    lay = stored(plan)
    assert lay["embed.weight"][1] == Shard(0) and lay["ids"] == (REPLICATE, REPLICATE)
    assert {lay[f"layers.{k}.up.weight"] for k in (0, 1)} == {(REPLICATE, Shard(1))}
    place = lay["layers.1.qkv.weight"][0]  # its dim 0 is (q k v, heads, head_dim)
    assert isinstance(place, Shard) and place.dim == 0 and place.first <= 1 < place.first + place.length
    assert obeys(plan, pins) and verified(plan)
    assert plan.certificate.question.pins == pins
    assert plan.certificate.status == "pinned"


def test_ops_do_what_is_pinned():
    pins = ("layers.*.up=a0:ffn", "attention=a0:heads", "layers.*.norm2=a0:whole", "layers.*.down=Shard(0)")
    plan = plan_of("decoder", "2", pins=pins)
    named = named_dims(plan.program, 0)
    seen = set()
    for n, (node, choice) in enumerate(zip(plan.program.nodes, plan.decisions.choices, strict=True)):
        if node.phase == "backward":
            continue
        loops = [[named.names[named.classes.of_factor[n][f]] for f in cut_factors(text)] for text in choice]
        if node.op == "aten.addmm.default" and node.module.endswith(".up"):
            assert loops[0] == ["ffn"]
            seen.add("up")
        if node.op == "fxpar.attention.default":
            assert loops[0] == ["heads"]
            seen.add("attention")
        if node.op == "aten.native_layer_norm.default" and node.module.endswith("norm2"):
            assert choice[0] == "."
            seen.add("norm")
        if node.op == "aten.view.default" and node.module.endswith(".down") and len(
                plan.program.dims[node.outputs[0]]) == 3:
            result = choice_by_names(site_of(node, plan.program), choice, plan.decisions.mesh).outputs[0]
            assert all(isinstance(p, Shard) and p.dim == 0 for p in result)
            seen.add("down")
    assert seen == {"up", "attention", "norm", "down"}
    assert obeys(plan, pins) and verified(plan)


def test_a_pending_result_can_be_pinned():
    plan = plan_of("mlp", "2", pins=["0/addmm=Partial"])
    node = matched(plan.program, "0/addmm").results[0]
    choice = choice_by_names(site_of(plan.program.nodes[node], plan.program), plan.decisions.choices[node],
                             plan.decisions.mesh)
    assert isinstance(choice.outputs[0][0], Partial) and verified(plan)


def test_a_pin_is_stronger_than_the_name_of_its_axis():
    pins = ("layers.*.up=tp:batch", "embed.weight=dp:Shard(0)", "attention=dp:heads")
    plan = plan_of("decoder", "dp=2,tp=2", pins=pins)
    assert obeys(plan, pins) and verified(plan)
    others = matched(plan.program, "layers.*.down/addmm").computing
    named = named_dims(plan.program, 0)
    for n in others:  # not pinned: dp splits the batch, tp never
        loops = [{named.names[named.classes.of_factor[n][f]] for f in cut_factors(text)}
                 for text in plan.decisions.choices[n]]
        assert "batch" in loops[0] and "batch" not in loops[1]


def test_pins_of_the_source_count_too():
    taken, source = captured("mlp")
    source = dataclasses.replace(source, hints=("0.weight=Shard(1)",))
    plan = compile_model(source, mesh="2", captured=taken, pins=["2.weight=Shard(0)"]).plan
    assert stored(plan)["0.weight"] == (Shard(1),) and stored(plan)["2.weight"] == (Shard(0),)


def test_random_choices_obey():
    pins = ("layers.*.up=a0:ffn", "embed.weight=S(1)")
    plan = plan_of("decoder", "2x2", random_choices=5, pins=pins, zero=3)
    assert obeys(plan, pins, 3)
    assert ("asked for 1", f"--pin '{pins[0]}'") in plan.provenance


# pins that cannot be


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (["embed.weight=tp:R"], "does not fit the mesh"),
        (["embed.weight=[R]"], "does not fit the mesh"),
        (["norm.bias=S(1)"], "norm.bias has no dim 1"),
        (["norm=S(3)"], "has no dim 3"),
        (["norm.bias=Partial"], "cannot be stored as Partial"),
        (["layers.*.up=a0:fn"], "logical dim called fn"),
        (["ids=a0:ffn"], "logical dims there: batch, sequence"),
        (["nothing=R"], "is called 'nothing'"),
    ],
)
def test_pins_that_do_not_fit_the_program_are_errors(pins, said):
    with pytest.raises(FxparError) as caught:
        plan_of("decoder", "2x2", pins=pins)
    assert not isinstance(caught.value, Infeasible) and said in str(caught.value)


def test_all_of_them_are_said_at_once():
    with pytest.raises(FxparError) as caught:
        plan_of("decoder", "2x2", pins=["nothing=R", "norm.bias=S(1)", "layers.*.up=a0:fn"])
    assert all(word in str(caught.value) for word in ("'nothing'", "no dim 1", "called fn"))


def test_pins_that_leave_no_choice_are_named_and_no_others():
    with pytest.raises(Infeasible) as caught:
        plan_of("decoder", "2x2", pins=["embed.weight=a1:S(0)", "embed*=a0:R", "*bed.weight=a1:S(1)", "head.weight=R"])
    text = str(caught.value)
    assert "embed.weight=a1:S(0)" in text and "*bed.weight=a1:S(1)" in text and "parameter embed.weight" in text
    assert "embed*=a0:R" not in text and "head.weight" not in text and "offered there: [R, R]" in text
    with pytest.raises(Infeasible, match="--pin '/gelu=Partial' leaves no choice for aten.gelu.default in layers.0"):
        plan_of("decoder", "2", pins=["embed/embedding=Shard(2)", "/gelu=Partial"])


# conflicts


def conflicts_of(kind: str, mesh: str, memory: int, *, zero=None, pins=(), recompute="auto") -> Conflicts:
    taken, source = captured_of(kind)
    asked = read_constraints(zero, pins)
    request = Request(taken[0], lambda of: prices(str(of)), memory, adamw, source.batch_dim, 0.01, silent, recompute,
                      asked)
    return Conflicts(request, (parse_mesh(mesh),))


def peak(kind: str, mesh: str) -> int:
    return plan_of(kind, mesh).prediction.peak_bytes


def check_minimal(conflicts: Conflicts) -> tuple[str, ...]:
    """The texts of the set found, after checking that it conflicts and that none of it can be spared."""
    found = conflicts.smallest()
    assert conflicts.plan(found) is None
    for member in found:
        rest = conflicts.plan([m for m in found if m is not member])
        assert rest is not None and rest.fits, member.text
        if member.kind == "memory":
            continue
        assert rest.prediction.peak_bytes <= conflicts.request.budget_bytes or "memory" not in {m.kind for m in found}
    return tuple(m.text for m in found)


def test_whole_parameters_and_little_memory_conflict_and_a_bystander_is_not_named():
    """A model that is all parameters: whole they need twice the memory of cut ones, whatever runs again."""
    budget = plan_of("wide", "2", zero=3).prediction.peak_bytes * 9 // 8
    assert budget < 0.75 * plan_of("wide", "2", zero=0).prediction.peak_bytes
    request = {"zero": 0, "pins": ("relu=batch",)}
    with pytest.raises(Infeasible) as caught:
        plan_of("wide", "2", memory=budget, **request)
    text = str(caught.value)
    assert "--memory" in text and "--zero 0" in text and "without --zero 0 there is one: " in text
    assert "relu" not in text
    found = check_minimal(conflicts_of("wide", "2", budget, **request))
    assert len(found) == 2 and found[0].startswith("--memory ") and found[1] == "--zero 0"
    # and so says compiling: with one of the two there is a plan
    assert plan_of("wide", "2", memory=budget, pins=request["pins"]).prediction.peak_bytes <= budget
    assert obeys(plan_of("wide", "2", **request), request["pins"], 0)


def test_what_does_not_fit_at_all_is_said_as_before():
    with pytest.raises(Infeasible, match="the model does not fit"):
        plan_of("wide", "2", memory=200 * KIB, zero=3, pins=["input=R"])


def test_recomputation_is_a_constraint():
    """A batch whose activations are most of the memory."""
    sizes = {"width": 64, "heads": 4, "layers": 2, "batch": 16, "length": 32}
    taken, source = captured("decoder", **sizes)
    whole = compile_model(source, mesh="dp=2", captured=taken).plan.prediction.peak_bytes
    with pytest.raises(Infeasible) as caught:
        compile_model(source, mesh="dp=2", captured=taken, recompute="off", memory=whole * 6 // 10, gap=0.1)
    text = str(caught.value)
    assert "--recompute off" in text and "--memory" in text and "without --recompute off there is one" in text


PINS = ("0.weight=R", "*.weight=R", "*.weight=Shard(0)", "*.bias=R", "input=R", "3=a0:whole", "0.weight=a0:S(1)",
        "addmm=Partial", "2=a0:Shard(1)", "input=a0:S(0)", "relu=a0:batch")


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["2", "2", "dp=2"]), st.lists(st.sampled_from(PINS), max_size=3, unique=True),
    st.sampled_from([None, None, 0, 2, 3]), st.sampled_from([None, 1.0, 0.8, 0.6, 0.45]), st.booleans(),
)
def test_plans_obey_what_is_drawn_or_a_minimal_conflict_is_named(mesh, pins, zero, share, run):
    """A few are also run on virtual ranks."""
    mesh_pins = tuple(pin.replace("a0:", "dp:") if "dp" in mesh else pin for pin in pins)
    memory = None if share is None else int(share * peak("wide", mesh))
    try:
        plan = plan_of("wide", mesh, pins=mesh_pins, zero=zero, memory=memory)
    except Infeasible as error:
        assert share is not None or len(mesh_pins) > 0
        if "leave" not in error.what:  # several constraints, or too little memory for everything
            check_minimal(conflicts_of("wide", mesh, memory or 2**40, zero=zero, pins=mesh_pins))
        return
    assert obeys(plan, mesh_pins, zero)
    assert memory is None or plan.prediction.peak_bytes <= memory
    verified(plan)
    if run:
        _, source = captured_of("wide")
        assert verify_plan(plan, source).ok


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(PINS), min_size=1, max_size=4, unique=True), st.sampled_from(["2", "2x2"]))
def test_pins_without_a_choice_are_a_minimal_set(pins, mesh):
    """Against trying every part of the pins on every op and input."""
    program, on = mlp_program(), parse_mesh(mesh)

    def possible(texts) -> bool:
        try:
            apply(read_constraints(None, texts), program, on, named_dims(program, 0)).check_possible()
        except Infeasible:
            return False
        return True

    try:
        apply(read_constraints(None, pins), program, on, named_dims(program, 0)).check_possible()
    except Infeasible as error:
        for line in (error.what, *(number for number in error.numbers if "--pin" in number)):
            blamed = [pin for pin in pins if f"--pin '{pin}'" in line]
            assert blamed and not possible(blamed)
            assert all(possible([p for p in blamed if p != pin]) for pin in blamed)
        return
    nodes, inputs = filters(None, apply(read_constraints(None, pins), program, on, named_dims(program, 0)))
    for index, item in enumerate(program.inputs):
        assert inputs(index, stored_layouts(item, program.dims[item.value], on))


def test_the_same_request_names_the_same_conflict():
    first, second = (check_minimal(conflicts_of("wide", "2", peak("wide", "2") * 3 // 5, zero=0, pins=("input=R",)))
                     for _ in range(2))
    assert first == second


# hints


def test_a_plan_given_as_a_hint_is_begun_with_and_never_lost():
    old = plan_of("mlp", "2x2", pins=["0=a1:d24", "2=a0:batch"])
    plan = plan_of("mlp", "2x2", hints=[old])
    shown = {c.name: c for c in plan.candidates}
    assert shown["hint"].prediction == old.prediction
    assert plan.prediction.step_ns <= old.prediction.step_ns
    assert plan.certificate.status in ("optimal", "feasible") and verified(plan)


def test_a_hint_that_does_not_obey_is_shown_and_not_chosen():
    free, pins = plan_of("mlp", "2x2"), ("0=a0:batch,a1:d24", "2=a1:batch")
    assert not obeys(free, pins)
    plan = plan_of("mlp", "2x2", hints=[free], pins=pins)
    assert obeys(plan, pins) and "hint" in {c.name for c in plan.candidates}
    assert plan.candidates[0].name != "hint"


def test_hints_of_other_programs_and_meshes_are_refused():
    old = plan_of("decoder", "2")
    with pytest.raises(PlanMismatch, match="for mesh a0=2"):
        plan_of("decoder", "2x2", hints=[old])
    with pytest.raises(PlanMismatch, match="of another program"):
        plan_of("mlp", "2", hints=[old])
    bad = msgspec.structs.replace(old, decisions=msgspec.structs.replace(
        old.decisions, choices=(("f99",), *old.decisions.choices[1:])))
    with pytest.raises(PlanMismatch, match="do not offer"):
        plan_of("decoder", "2", hints=[bad])


# certificates


@pytest.mark.parametrize("change", [
    {"pins": ()}, {"pins": ("layers.*.up=a0:hidden",)}, {"pins": ("nothing=R",)}, {"pins": ("a",)}, {"zero": None},
    {"zero": 0}, {"zero": 7}, {"pins": ("layers.*.up=a0:ffn", "embed.weight=S(0)", "embed*=S(1)")},
])
def test_changed_constraints_are_caught(change):
    plan = plan_of("decoder", "2", pins=("layers.*.up=a0:ffn",), zero=3)
    assert verified(plan)
    question = msgspec.structs.replace(plan.certificate.question, **change)
    other = msgspec.structs.replace(plan, certificate=msgspec.structs.replace(plan.certificate, question=question))
    assert any(f.outcome == "problem" for f in certificate_findings(decode(encode(other))))


def test_roles_of_the_filters_are_those_of_the_axes():
    program, on = mlp_program(), parse_mesh("dp=2,tp=2")
    assert roles_of(on) == ("dp", "tp")
    assert filters(None, None) == (None, None)
    none = apply(read_constraints(None, ()), program, on, named_dims(program, 0))
    assert filters(None, none) == (None, None)
