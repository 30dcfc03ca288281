"""Whatever is decided, all ranks together compute what one device computes."""

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpar.plans.errors import PlanFileError
from fxpar.plans.mesh import parse_mesh
from fxpar.plans.program import Ref
from fxpar.runtime.interpret import run_global
from fxpar.runtime.virtual import run_virtual
from tests.runtime.small_programs import (
    ProgramBuilder,
    global_inputs,
    pure_data_parallel,
    random_decisions,
    random_layout,
    two_layers,
)
from tests.runtime.tiny_models import captured, tied, tokens

torch.set_num_threads(1)
MESHES = ["1", "2", "3", "4", "2x2", "2x3", "2x1x2", "5"]


def same(result, expected):
    for got, want in zip(result.outputs, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert max(result.disagreement) == 0.0


@settings(max_examples=60)
@given(st.sampled_from(MESHES), st.integers(0, 10**9), st.integers(1, 7), st.booleans(), st.booleans())
def test_any_decisions_compute_the_same(mesh, seed, batch, compound, recompute):
    program = two_layers(batch=batch * 4, atoms=(batch, 4) if compound and batch > 1 else None)
    decisions = random_decisions(program, parse_mesh(mesh), random.Random(seed), recompute)
    inputs = global_inputs(program, seed)
    same(run_virtual(program, decisions, inputs), run_global(program, inputs))


@settings(max_examples=100)
@given(st.sampled_from(MESHES), st.integers(0, 10**9))
def test_any_reshard(mesh, seed):
    """One hub: a value goes from any layout through any layout to any layout."""
    rng = random.Random(seed)
    dims = tuple(tuple(rng.choice([2, 3, 4, 5, 8]) for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 3)))
    p = ProgramBuilder()
    x = p.input("input", "x", dims)
    y = p.op("fxpar.hub.default", Ref(x), dims=dims)
    p.output(y, "output", "y")
    p.output(x, "output", "x")
    program = p.program()
    decisions = random_decisions(program, parse_mesh(mesh), rng)
    inputs = global_inputs(program, seed)
    same(run_virtual(program, decisions, inputs), [inputs[program.inputs[0].value]] * 2)


@settings(max_examples=15)
@given(st.sampled_from(MESHES), st.integers(0, 10**9), st.booleans())
def test_a_captured_model_with_dropout_and_ties(mesh, seed, recompute):
    program, inputs, expected = tied_with_dropout()
    decisions = random_decisions(program, parse_mesh(mesh), random.Random(seed), recompute)
    same(run_virtual(program, decisions, inputs), expected)


@functools.cache
def tied_with_dropout():
    program = captured(tied(dropout=0.3), (), tokens())
    stored = dict(tied().state_dict())
    inputs = {
        **{e.value: stored[e.name] for e in program.inputs if e.name in stored},
        **{e.value: tokens()[e.name] for e in program.inputs if e.kind == "input"},
        **{e.value: torch.tensor(1.0, dtype=torch.float64) for e in program.inputs if e.kind == "tangent"},
        **{e.value: torch.tensor(11) for e in program.inputs if e.kind == "seed"},
    }
    return program, inputs, run_global(program, inputs)


def test_data_parallel_has_one_collective_per_result():
    program = two_layers(batch=8)
    decisions = pure_data_parallel(program, parse_mesh("4"))
    result = run_virtual(program, decisions, global_inputs(program))
    kinds = [(s.kind, s.phase, len(s.values)) for s in result.programs[0].steps if hasattr(s, "values")]
    # the loss in forward, both gradients in one bucket
    assert sorted(kinds) == [("all_reduce", "backward", 2), ("all_reduce", "forward", 1)]


def test_a_choice_that_the_rule_lacks_is_refused():
    program = two_layers()
    good = pure_data_parallel(program, parse_mesh("2"))
    bad = type(good)(good.mesh, (("f9",), *good.choices[1:]), good.inputs, good.outputs)
    with pytest.raises(PlanFileError, match="f9"):
        run_virtual(program, bad, global_inputs(program))


def test_layouts_are_drawn_with_minor_runs():
    rng = random.Random(1)
    drawn = {random_layout(((4, 3, 2), (5,)), parse_mesh("2x2"), rng) for _ in range(200)}
    assert any(getattr(p, "first", 0) for layout in drawn for p in layout)
