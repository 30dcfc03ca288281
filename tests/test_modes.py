"""What becomes of forward results: as the rewritten program keeps them and runs them again."""

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.formulate import formulate
from fxpar.memory_units import MEMORY_UNIT
from fxpar.modes import AGAIN, DROPPED, KEPT, kind_of, nodes_to_repeat, offered_modes, pinned_modes
from fxpar.plans.layout import replicated
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program, node_inputs
from fxpar.recompute import layer_of, recompute_nodes
from fxpar.replay_memory import storage_roots
from fxpar.runtime.local import CollectiveStep, OpStep, type_bytes
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.partition import partition
from fxpar.runtime.rewrite.passes import rewrite
from fxpar.simulate import local_step_ns
from fxpar.solver.random_assignment import random_assignment
from tests.compiled import adamw, decoder_program, mlp_program, prices

torch.set_num_threads(1)


def whole(program: Program, recompute: tuple[int, ...]) -> Decisions:
    mesh = parse_mesh("1")
    lay = replicated(mesh)
    return Decisions(mesh, ((".",),) * len(program.nodes), (lay,) * len(program.inputs),
                     (lay,) * len(program.outputs), recompute)


def drawn(program: Program, level: str, seed: int) -> tuple[int, ...]:
    if level != "drawn":
        return recompute_nodes(program, level)
    draw = torch.rand(len(program.nodes), generator=torch.Generator().manual_seed(seed))
    return tuple(i for i, n in enumerate(program.nodes)
                 if n.phase == "forward" and (draw[i] < 0.4 or kind_of(n) != "op"))


@settings(max_examples=20)
@given(st.sampled_from(["none", "cheap", "layers", "drawn"]), st.integers(0, 10**6))
def test_pinned_modes_are_those_of_the_rewritten_program(level, seed):
    """Seen through views: a kept view keeps what it looks at."""
    program = decoder_program()
    recompute = drawn(program, level, seed)
    modes, _ = pinned_modes(program, recompute)
    local = rewrite(program, whole(program, recompute), (0,))
    producer = {v: i for i, n in enumerate(program.nodes) for v in n.outputs if v >= 0}
    inputs = {i.value for i in program.inputs}

    def base(value: int) -> int:
        while value in producer and kind_of(program.nodes[producer[value]]) != "op":
            value = node_inputs(program.nodes[producer[value]])[0]
        return value

    saved = {base(local.origins[v][0]) for v in partition(program, local).saved} - inputs
    kept = {i for i, mode in enumerate(modes) if mode == KEPT and kind_of(program.nodes[i]) == "op"}
    assert {producer[v] for v in saved} <= kept
    again = {s.node for s in local.steps if isinstance(s, OpStep) and s.recomputed}
    listed = {i for i, mode in enumerate(modes) if mode == AGAIN and kind_of(program.nodes[i]) != "hub"}
    assert listed >= again and all(kind_of(program.nodes[i]) == "view" for i in listed - again)
    if level != "drawn":
        assert {producer[v] for v in saved} == kept


def free_problem(program: Program, mesh: str, reuse: bool = False):
    return formulate(program, parse_mesh(mesh), prices(mesh), budget_bytes=None, optimizer_bytes=adamw, recompute=None,
                     reuse="free" if reuse else "never")


@settings(max_examples=20)
@given(st.sampled_from(["mlp", "decoder"]), st.sampled_from(["1", "2", "2x2"]), st.booleans(), st.integers(0, 10**6))
def test_a_free_assignment_costs_what_its_rewritten_program_does(name, mesh, reuse, seed):
    """At least: a mode that nothing wants is paid for, a reshard that two need in backward is made once."""
    program = {"mlp": mlp_program, "decoder": decoder_program}[name]()
    form = free_problem(program, mesh, reuse)
    assignment = random_assignment(form.problem, seed)
    cost = form.problem.cost(assignment)
    if cost is None:
        return
    decisions = form.decisions(assignment)
    priced = prices(mesh)
    local = localise(program, decisions, (0,) * len(form.mesh.axes))
    ops = sum(local_step_ns(s, local, priced) for s in local.steps if isinstance(s, OpStep))
    modes = [form.modes[c][assignment[c]] for c in form.classes.nodes]
    again = {s.node for s in local.steps if isinstance(s, OpStep) and s.recomputed}
    idle = sum(
        priced.op_ns(form.classes.sites[i], form.node_states[c][assignment[c]])
        for i, (c, mode) in enumerate(zip(form.classes.nodes, modes, strict=True))
        if mode == AGAIN and i not in again
    )
    moves = sum(
        priced.collective_ns(s.kind, s.axis, s.bytes) if isinstance(s, CollectiveStep)
        else local_step_ns(s, local, priced)
        for s in local.steps if not isinstance(s, OpStep)
    )
    assert cost == ops + idle if not moves else cost >= ops + idle
    # nothing is saved that the problem does not count as kept
    halves = partition(program, local)
    roots = storage_roots(local)
    made = {v: s for s in local.steps if isinstance(s, OpStep) and s.phase == "forward" for v in s.writes}
    saved = {roots[v] for v in halves.saved} & set(made)
    node_modes = dict(enumerate(modes))
    for value in saved:
        step = made[value]
        if kind_of(program.nodes[step.node]) == "op":
            assert node_modes[step.node] == KEPT
    static = form.problem.memory(assignment) * MEMORY_UNIT
    assert sum(type_bytes(local.types[v]) for v in saved) <= static


def test_what_must_be_there_is_never_dropped_and_layers_keep_their_borders():
    program = decoder_program()
    offered = offered_modes(program)
    late = {v for n in program.nodes if n.phase == "backward" for v in node_inputs(n)}
    for node, modes in zip(program.nodes, offered.modes, strict=True):
        if node.phase == "backward":
            assert modes == ()
        else:
            assert modes and (DROPPED in modes) == late.isdisjoint(node.outputs)
    form = free_problem(program, "1")
    for seed in range(20):
        assignment = random_assignment(form.problem, seed)
        if form.problem.cost(assignment) is None:
            continue
        modes = [form.modes[c][assignment[c]] for c in form.classes.nodes]
        maker = {v: i for i, n in enumerate(program.nodes) for v in n.outputs if v >= 0}
        for index, node in enumerate(program.nodes):
            if node.phase == "forward" and modes[index] == AGAIN:
                for value in node_inputs(node):
                    m = maker.get(value)
                    assert m is None or modes[m] == KEPT or (
                        modes[m] == AGAIN and layer_of(program.nodes[m].module) == layer_of(node.module))
        assert set(nodes_to_repeat(program, modes)) == set(form.decisions(assignment).recompute)


def test_nothing_is_kept_without_a_backward():
    program = decoder_program()
    forward = msgspec.structs.replace(program, nodes=tuple(n for n in program.nodes if n.phase == "forward"))
    modes, seen = pinned_modes(forward, recompute_nodes(program, "layers"))
    assert set(modes) == {DROPPED} and not seen
    assert {m for row in offered_modes(forward).modes for m in row} == {DROPPED}
