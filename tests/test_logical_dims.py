"""Logical dims: natural atoms on the patterns of real models, and laws that hold on any program."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpar.logical_dims import analyse, atoms_of, chain, twins
from fxpar.plans.program import Program, Ref
from fxpar.rules.choices import factors_on_atoms, site_of
from tests.program_builder import ProgramBuilder, programs

torch.set_num_threads(1)


def dims_of(program: Program, ref: Ref) -> tuple[tuple[int, ...], ...]:
    return program.dims[ref.id]


def whole_views(program: Program) -> list[int]:
    """Nodes with an atom that is no factor of theirs."""
    found = []
    for index, node in enumerate(program.nodes):
        site = site_of(node, program)
        factors = factors_on_atoms(site)
        for operand, dims in enumerate(site.inputs):
            seen = {f.inputs[operand] for f in factors}
            if any((dim, i) not in seen for dim, atoms in enumerate(dims) for i in range(len(atoms))):
                found.append(index)
    return found


def test_projection_around_a_flatten():
    b = ProgramBuilder()
    x, w = b.enter("x", (5, 7, 12)), b.parameter("w", (12, 30))
    flat = b.call("view", x, (35, 12))
    y = b.call("mm", flat, w)
    out = b.call("view", y, (5, 7, 30))
    program = analyse(b.done())
    assert dims_of(program, x) == ((5,), (7,), (12,))
    assert dims_of(program, flat) == ((5, 7), (12,))
    assert dims_of(program, w) == ((12,), (30,))
    assert dims_of(program, y) == ((5, 7), (30,))
    assert dims_of(program, out) == ((5,), (7,), (30,))
    assert not whole_views(program)


def test_grouped_query_heads_reach_the_weights():
    b = ProgramBuilder()
    batch, seq, kv, rep, e, d = 3, 5, 2, 4, 8, 24
    x = b.enter("x", (batch * seq, d))
    wq, wk = b.parameter("q", (kv * rep * e, d)), b.parameter("k", (kv * e, d))
    q = b.call("view", b.call("mm", x, b.call("t", wq)), (batch, seq, kv * rep, e))
    k = b.call("view", b.call("mm", x, b.call("t", wk)), (batch, seq, kv, e))
    k = b.call("expand", b.call("unsqueeze", k, 3), (batch, seq, kv, rep, e))
    k = b.call("_unsafe_view", b.call("clone", k), (batch, seq, kv * rep, e))
    scores = b.call("mul.Tensor", q, k)
    program = analyse(b.done())
    assert dims_of(program, wq) == ((kv, rep, e), (d,))
    assert dims_of(program, wk) == ((kv, e), (d,))
    assert dims_of(program, x) == ((batch, seq), (d,))
    assert dims_of(program, scores) == ((batch,), (seq,), (kv, rep), (e,))
    assert not whole_views(program)


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
def test_fused_projection(layout: str):
    b = ProgramBuilder()
    rows, d, h, e = 10, 24, 4, 6
    x, w = b.enter("x", (rows, d)), b.parameter("w", (d, 3 * d))
    y = b.call("mm", x, w)
    if layout == "stacked":
        q, _, _ = b.call("split.Tensor", y, d, 1)
        b.call("view", q, (rows, h, e))
        expected = (3, h, e)
    else:
        b.call("split.Tensor", b.call("view", y, (rows, h, 3 * e)), e, 2)
        expected = (h, 3, e)
    program = analyse(b.done())
    assert dims_of(program, w) == ((d,), expected)
    assert dims_of(program, y) == ((rows,), expected)


def test_views_that_nest_and_views_that_do_not():
    b = ProgramBuilder()
    x, z = b.enter("x", (6, 4)), b.enter("z", (20, 9))
    y = b.call("view", x, (3, 8))
    u = b.call("view", z, (30, 6))
    program = analyse(b.done())
    assert (dims_of(program, x), dims_of(program, y)) == (((3, 2), (4,)), ((3,), (2, 4)))
    # 20 does not divide 30: that view keeps its group whole, nothing is cut
    assert (dims_of(program, z), dims_of(program, u)) == (((20,), (9,)), ((30,), (6,)))
    assert whole_views(program) == [1]


def test_views_win_over_slices():
    b = ProgramBuilder()
    x = b.enter("x", (4, 12))
    b.call("slice.Tensor", x, 1, 0, 3)  # asks for blocks (4 3)
    b.call("view", x, (4, 6, 2))  # cut at 6: against 4
    assert dims_of(analyse(b.done()), x) == ((4,), (6, 2))


def test_a_shared_divisor_is_no_reason_to_cut():
    b = ProgramBuilder()
    table, x = b.enter("positions", (512,)), b.enter("x", (12,))
    y = b.call("add.Tensor", b.call("slice.Tensor", table, 0, 0, 12), x)
    program = analyse(b.done())
    assert dims_of(program, y) == ((12,),)


def test_window_partition():
    b = ProgramBuilder()
    x = b.enter("x", (2, 6, 6, 5))
    y = b.call("permute", b.call("view", x, (2, 2, 3, 2, 3, 5)), (0, 1, 3, 2, 4, 5))
    y = b.call("_unsafe_view", b.call("clone", y), (8, 9, 5))
    program = analyse(b.done())
    assert dims_of(program, x) == ((2,), (2, 3), (2, 3), (5,))
    assert dims_of(program, y) == ((2, 2, 2), (3, 3), (5,))


def test_sizes_zero_and_one():
    b = ProgramBuilder()
    x = b.enter("x", (1, 0, 3))
    y = b.call("neg", x)
    program = analyse(b.done())
    assert dims_of(program, x) == dims_of(program, y) == ((), (0,), (3,))


def test_gradients_and_buffers_have_the_dims_of_what_they_update():
    b = ProgramBuilder()
    w, g = b.parameter("w", (12,)), b.enter("g", (3, 4))
    buffer, new = b.enter("n", (8,), "buffer"), b.enter("m", (2, 4))
    b.leave(b.call("view", g, (12,)), "gradient", "w")
    b.leave(b.call("view", new, (8,)), "buffer", "n")
    program = analyse(b.done())
    assert dims_of(program, w) == ((3, 4),)
    assert dims_of(program, buffer) == ((2, 4),)
    assert len(twins(program)) == 2


@pytest.mark.parametrize("size", [4, 16])
def test_equal_sizes_change_nothing(size: int):
    """Atoms come from what ops do, not from which sizes happen to be equal."""

    def block(b_, s, h, e, f):
        b = ProgramBuilder()
        x = b.enter("x", (b_, s, h * e))
        w, u = b.parameter("w", (h * e, h * e)), b.parameter("u", (h * e, f))
        q = b.call("view", b.call("mm", b.call("view", x, (b_ * s, h * e)), w), (b_, s, h, e))
        q = b.call("transpose.int", q, 1, 2)
        k = b.call("transpose.int", q, 2, 3)
        scores = b.call("bmm", b.call("reshape", q, (b_ * h, s, e)), b.call("reshape", k, (b_ * h, e, s)))
        mixed = b.call("bmm", scores, b.call("reshape", q, (b_ * h, s, e)))
        mixed = b.call("transpose.int", b.call("view", mixed, (b_, h, s, e)), 1, 2)
        b.call("mm", b.call("reshape", mixed, (b_ * s, h * e)), u)
        return analyse(b.done())

    equal, distinct = block(size, size, size, size, size), block(2, 3, 5, 7, 11)
    counts = [[[len(atoms) for atoms in dims] for dims in p.dims] for p in (equal, distinct)]
    assert counts[0] == counts[1]


@given(programs(), st.randoms(use_true_random=False))
def test_atoms_multiply_to_the_sizes_and_the_order_of_nodes_does_not_matter(program: Program, random):
    analysed = analyse(program)
    for type_, dims in zip(analysed.types, analysed.dims, strict=True):
        assert tuple(math.prod(atoms) for atoms in dims) == type_.shape
        assert all(atom > 1 for atoms in dims for atom in atoms)
    for _ in range(3):
        order = list(range(len(program.nodes)))
        random.shuffle(order)
        assert analyse(program, order).dims == analysed.dims
    assert analyse(analysed) == analysed


@given(programs())
def test_operands_that_one_loop_fills_have_the_same_atoms(program: Program):
    """Elementwise ops and transposes never have to keep anything whole."""
    analysed = analyse(program)
    whole = whole_views(analysed)
    for index in whole:
        assert analysed.nodes[index].op not in ("aten.add.Tensor", "aten.transpose.int", "aten.mm.default")


@given(st.dictionaries(st.sampled_from([2, 3, 4, 6, 8, 9, 12, 18, 24, 36]), st.booleans()))
def test_chain_nests_is_maximal_and_keeps_what_conflicts_with_none(cuts):
    kept = chain(cuts)

    def nest(a, b):
        return a % b == 0 or b % a == 0

    assert all(nest(a, b) for a, b in itertools.combinations(kept, 2))
    for cut in cuts:
        if all(nest(cut, other) for other in cuts):
            assert cut in kept
        elif cut not in kept:
            assert not all(nest(cut, other) for other in kept)
    assert math.prod(atoms_of(72, kept)) == 72


def test_hard_cuts_come_before_soft_ones():
    assert chain({4: False, 6: True}) == (6,)
    assert chain({4: True, 6: False}) == (4,)
    assert chain({4: True, 6: True}) == (4,)
