"""The numeric problem says what the plan costs: recounted without it, tied and not; and its optimum is the optimum."""

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.formulate import Formulation, formulate, output_layouts, useful
from fxpar.layers import tie_layers
from fxpar.lifetimes import keepable
from fxpar.modes import AGAIN, KEPT, kind_of, pinned_modes, times
from fxpar.plans.errors import Infeasible
from fxpar.plans.layout import Partial, Shard, largest_shape, replicated
from fxpar.plans.mesh import Mesh, parse_mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, node_inputs
from fxpar.prices import Prices
from fxpar.recompute import recompute_nodes
from fxpar.rules.choices import choice_by_names, joint_choices, site_of
from fxpar.rules.ops.hub import HUB
from fxpar.runtime.local import CollectiveStep, OpStep
from fxpar.runtime.rewrite.localise import localise
from fxpar.simulate import local_step_ns
from fxpar.solver.brute_force import brute_force
from fxpar.solver.problem import FORBIDDEN
from fxpar.solver.random_assignment import random_assignment
from fxpar.solver.solve import solve
from fxpar.stored import stored_layouts
from tests.compiled import adamw, decoder_program, mlp_program, prices

torch.set_num_threads(1)


def problem_of(program: Program, mesh: str, **wishes) -> Formulation:
    wishes.setdefault("budget_bytes", None)
    return formulate(program, parse_mesh(mesh), prices(mesh), optimizer_bytes=adamw, **wishes)


def recount(program: Program, decisions: Decisions, priced: Prices, again: frozenset[int], reuse: bool = False) -> int:
    """Time of the decisions, counted node by node and use by use: what runs again brings its operands along again, a
    backward hub that reads the forward hub's copy (or, with ``reuse``, shares what is made again) brings nothing."""
    modes, _ = pinned_modes(program, decisions.recompute, decisions.reuse)
    partners = keepable(program, tie_layers(program)) if reuse else {}
    entering = {i.value for i in program.inputs}
    made = dict(zip((i.value for i in program.inputs), decisions.inputs, strict=True))
    total = 0
    for index, (node, names) in enumerate(zip(program.nodes, decisions.choices, strict=True)):
        choice = choice_by_names(site_of(node, program), names, decisions.mesh)
        total += priced.op_ns(site_of(node, program), choice) * (1 + (index in again))
        repeats = times(kind_of(node), modes[index]) if index in decisions.recompute else 1
        f = partners.get(index, -1)
        if index in decisions.reuse or (f in decisions.recompute and modes[f] in (KEPT, AGAIN)
                                        and decisions.choices[f] == names):
            repeats = 0
        for value, want in dict.fromkeys(zip(node_inputs(node), choice.inputs, strict=True)):
            price = priced.input_ns if value in entering else priced.reshard_ns
            total += repeats * price(made[value], want, program.dims[value], program.types[value])
        made.update((v, lay) for v, lay in zip(node.outputs, choice.outputs, strict=True) if v >= 0)
    for output, want in zip(program.outputs, decisions.outputs, strict=True):
        price = priced.gradient_ns if output.kind in ("gradient", "buffer") else priced.reshard_ns
        total += price(made[output.value], want, program.dims[output.value], program.types[output.value])
    return total


PROGRAMS = {"mlp": mlp_program, "decoder": decoder_program}


@settings(max_examples=12)
@given(st.sampled_from(["mlp", "decoder"]), st.sampled_from(["2", "3", "2x2"]), st.booleans(), st.booleans(),
       st.integers(0, 10**6))
def test_the_cost_of_an_assignment_is_the_recount_of_its_decisions(name, mesh, tied, reuse, seed):
    program = PROGRAMS[name]()
    level = "layers" if name == "decoder" and seed % 2 else "none"
    form = problem_of(
        program, mesh, tied=tied, recompute=recompute_nodes(program, level), reuse="free" if reuse else "never"
    )
    assignment = random_assignment(form.problem, seed)
    if form.problem.cost(assignment) is None:
        return
    decisions = form.decisions(assignment)
    assert decisions.outputs == output_layouts(program, decisions.inputs, form.mesh)
    again = repeated(program, form.mesh, decisions.recompute)
    assert form.problem.cost(assignment) == recount(program, decisions, prices(mesh), again, reuse)
    assert form.assignment(decisions) == assignment


def repeated(program: Program, mesh: Mesh, recompute: tuple[int, ...]) -> frozenset[int]:
    """The nodes that rank 0 really runs again, with everything replicated."""
    whole = replicated(mesh)
    plain = Decisions(mesh, tuple((".",) * len(mesh.axes) for _ in program.nodes), (whole,) * len(program.inputs),
                      (whole,) * len(program.outputs), recompute)
    steps = localise(program, plain, (0,) * len(mesh.axes)).steps
    return frozenset(s.node for s in steps if isinstance(s, OpStep) and s.recomputed)


@settings(max_examples=12)
@given(st.sampled_from(["mlp", "decoder"]), st.sampled_from(["2", "3", "2x2"]), st.booleans(), st.integers(0, 10**6))
def test_the_cost_of_an_assignment_is_that_of_the_rewritten_program(name, mesh, reuse, seed):
    """Before bucketing, with gradients priced one by one: every op and every reshard of rank 0 once."""
    program = PROGRAMS[name]()
    form = problem_of(program, mesh, reuse="free" if reuse else "never")
    assignment = random_assignment(form.problem, seed)
    if form.problem.cost(assignment) is None:
        return
    decisions = form.decisions(assignment)
    priced = prices(mesh)
    local = localise(program, decisions, (0,) * len(form.mesh.axes))
    ops = sum(local_step_ns(s, local, priced) for s in local.steps if isinstance(s, OpStep))
    moves = sum(
        priced.collective_ns(s.kind, s.axis, s.bytes) if isinstance(s, CollectiveStep)
        else local_step_ns(s, local, priced)
        for s in local.steps if not isinstance(s, OpStep)
    )
    made = {i.value: lay for i, lay in zip(program.inputs, decisions.inputs, strict=True)}
    entering = frozenset(made)
    nodes = uses = late = bucketed = 0
    seen = set()
    for index, (node, names) in enumerate(zip(program.nodes, decisions.choices, strict=True)):
        choice = choice_by_names(site_of(node, program), names, form.mesh)
        nodes += priced.op_ns(site_of(node, program), choice)
        for value, want in dict.fromkeys(zip(node_inputs(node), choice.inputs, strict=True)):
            if index in decisions.reuse:
                continue
            of = (made[value], want, program.dims[value], program.types[value])
            price = priced.reshard_ns(*of)
            uses += price
            bucketed += priced.input_ns(*of) - price if value in entering else 0
            if (value, want, node.phase) in seen:  # read by several nodes in a layout that is not their hub's
                late -= price
            seen.add((value, want, node.phase))
        made.update((v, lay) for v, lay in zip(node.outputs, choice.outputs, strict=True) if v >= 0)
    for output, want in zip(program.outputs, decisions.outputs, strict=True):
        of = (made[output.value], want, program.dims[output.value], program.types[output.value])
        late += priced.reshard_ns(*of)
        bucketed += priced.gradient_ns(*of) if output.kind == "gradient" else priced.reshard_ns(*of)
    # collectives of choices that expand are counted among the ops' prices
    assert ops + moves == nodes + uses + late
    assert form.problem.cost(assignment) == nodes + uses + bucketed


def test_ties_multiply():
    """Two equal layers: the tied problem has the decisions of one and the costs of both."""
    program = decoder_program()
    tied, free = problem_of(program, "2", tied=True), problem_of(program, "2", tied=False)
    assert len(tied.problem.variables) < 0.8 * len(free.problem.variables)
    assignment = random_assignment(tied.problem, 3)
    spread = free.assignment(tied.decisions(assignment))
    assert free.problem.cost(spread) == tied.problem.cost(assignment)
    # rounded up to the unit once per class or once per node
    assert abs(free.problem.memory(spread) - tied.problem.memory(assignment)) <= len(free.problem.variables)
    for c, size in enumerate(tied.classes.sizes):
        assert size == Counter((*tied.classes.nodes, *tied.classes.inputs))[c]


def test_decisions_outside_the_states_have_no_assignment():
    program = decoder_program()
    form = problem_of(program, "2")
    decisions = form.decisions(random_assignment(form.problem, 1))
    wrong = Decisions(decisions.mesh, (("f77",), *decisions.choices[1:]), decisions.inputs, decisions.outputs)
    assert form.assignment(wrong) is None
    inputs = ((Partial("sum"),), *decisions.inputs[1:])
    assert form.assignment(Decisions(decisions.mesh, decisions.choices, inputs, decisions.outputs)) is None
    # two members of a class apart
    c = next(c for c in form.classes.nodes if form.classes.sizes[c] > 1 and len(form.node_states[c]) > 1)
    index = form.classes.nodes.index(c)
    other = next(s.names for s in form.node_states[c] if s.names != decisions.choices[index])
    apart = (*decisions.choices[:index], other, *decisions.choices[index + 1 :])
    assert form.assignment(Decisions(decisions.mesh, apart, decisions.inputs, decisions.outputs)) is None


@settings(max_examples=10)
@given(st.sampled_from([(4, 6, 2), (2, 3, 4), (8, 8, 8)]), st.sampled_from(["2", "3"]), st.sampled_from([None, 6, 7]))
def test_the_solver_finds_the_optimum_of_tiny_problems(sizes, mesh, units):
    width, hidden, batch = sizes
    program = first_nodes(mlp_program(width=width, hidden=hidden, batch=batch, layers=1), 4)
    form = problem_of(program, mesh, budget_bytes=None if units is None else units * 65536)
    assert math.prod(v.states for v in form.problem.variables) < 30_000
    want, got = brute_force(form.problem), solve(form.problem, gap=0.0)
    assert (got.status, got.cost) == (want.status, want.cost)


def first_nodes(program: Program, count: int) -> Program:
    """The first nodes of a program; the last result is its loss."""
    nodes = program.nodes[:count]
    used = {v for n in nodes for v in node_inputs(n)}
    outputs = (msgspec.structs.replace(program.outputs[0], value=nodes[-1].outputs[0]),)
    inputs = tuple(i for i in program.inputs if i.value in used)
    return msgspec.structs.replace(program, nodes=nodes, outputs=outputs, inputs=inputs)


@pytest.mark.parametrize("mesh", ["2", "4", "16", "2x2", "3x5", "2x2x2"])
def test_useful_choices_keep_the_whole_one_and_never_cut_a_loop_too_short(mesh):
    for program in (mlp_program(), decoder_program()):
        wanted = parse_mesh(mesh)
        for site in {site_of(n, program) for n in program.nodes}:
            every = joint_choices(site, wanted)
            kept = useful(site, every, wanted)
            assert kept[0].names == (".",) * len(wanted.axes) and set(kept) <= set(every)
            assert len({(c.inputs, c.outputs) for c in kept}) == len(kept)
            for choice in kept:
                for dims, layout in zip(site.inputs, choice.inputs, strict=True):
                    cut = [p for p in layout if isinstance(p, Shard)]
                    for p in cut:
                        ranks = math.prod(n for q, n in zip(layout, wanted.sizes, strict=True) if q == p)
                        assert math.prod(dims[p.dim][p.first : p.first + p.length]) >= ranks


def test_memory_is_that_of_the_stored_shards():
    program = mlp_program(width=256, hidden=512)
    form = problem_of(program, "2x2")
    assignment = random_assignment(form.problem, 9)
    decisions = form.decisions(assignment)
    for c, item, layout in zip(form.classes.inputs, program.inputs, decisions.inputs, strict=True):
        if item.kind == "parameter":
            elements = math.prod(largest_shape(program.dims[item.value], layout, form.mesh))
            assert form.problem.variables[c].memory[assignment[c]] == form.classes.sizes[c] * -(-elements * 16 // 65536)


def test_what_is_recomputed_is_not_saved():
    program = decoder_program(width=256, heads=4, layers=2)
    least = {}
    for level in ("none", "cheap", "layers"):
        form = problem_of(program, "1", recompute=recompute_nodes(program, level))
        whole = [0] * len(form.problem.variables)
        least[level] = form.problem.memory(whole), form.problem.cost(whole)
    assert least["none"][0] > least["cheap"][0] > least["layers"][0]
    assert least["none"][1] < least["cheap"][1] < least["layers"][1]


def test_constraints_that_leave_nothing_are_named():
    program = mlp_program()
    with pytest.raises(Infeasible, match="no choice for aten"):
        problem_of(program, "2", node_filter=lambda i, site, choices: [])
    with pytest.raises(Infeasible, match="no layout for 0.weight"):
        problem_of(program, "2", input_filter=lambda i, layouts: [])


def test_filters_are_obeyed():
    program = mlp_program()
    form = problem_of(
        program, "2", node_filter=lambda i, site, choices: choices[-1:], input_filter=lambda i, lays: lays[-1:]
    )
    assert all(v.states == 1 for v in form.problem.variables)
    decisions = form.decisions([0] * len(form.problem.variables))
    for item, layout in zip(program.inputs, decisions.inputs, strict=True):
        assert layout == stored_layouts(item, program.dims[item.value], form.mesh)[-1]


def test_hubs_cost_nothing_and_tables_are_shared():
    program = decoder_program()
    form = problem_of(program, "2")
    hubs = [c for n, c in zip(program.nodes, form.classes.nodes, strict=True) if n.op == HUB]
    assert hubs and all(not form.problem.variables[c].costs.any() for c in hubs)
    assert len(form.problem.tables) < len(form.problem.edges)
    distinct = {(t.shape, t.tobytes()) for t in form.problem.tables}
    assert len(distinct) <= len(form.problem.tables)
    assert all(t.min() >= 0 for t in form.problem.tables)


def test_classes_of_the_program_are_those_of_the_problem():
    program = decoder_program()
    assert problem_of(program, "2").classes == tie_layers(program)


def test_forbidden_is_only_what_the_low_precision_guard_forbids():
    assert all(int(t.max()) < FORBIDDEN for t in problem_of(decoder_program(), "2x2").problem.tables)
    half = problem_of(decoder_program(precision="bf16"), "2").problem
    barred = [t for t in half.tables if int(np.max(t)) >= FORBIDDEN]
    assert barred and all(int(t.min()) < FORBIDDEN for t in barred)
