"""Generators of meshes, dims, layouts, programs and plans."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from fxpar.plans.layout import (
    REPLICATE,
    Dims,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    valid_layout,
    whole_dims,
)
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.plan import (
    Candidate,
    Certificate,
    CollectiveTotal,
    Decisions,
    Fingerprint,
    Overlap,
    Pipeline,
    Plan,
    Prediction,
    Proof,
    Question,
)
from fxpar.plans.program import Constant, Dtype, Input, Node, Output, Program, Ref, TensorType
from fxpar.plans.schedule import Schedule

SMALL = [1, 2, 3, 4, 5, 8]


def meshes(most_axes: int = 3, most_ranks: int = 16) -> st.SearchStrategy[Mesh]:
    """1 to ``most_axes`` axes of 1 to 5 ranks."""
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=most_axes)
    return sizes.filter(lambda s: math.prod(s) <= most_ranks).map(mesh_of)


def mesh_of(sizes: list[int] | tuple[int, ...]) -> Mesh:
    return Mesh(tuple(Axis(f"a{i}", n) for i, n in enumerate(sizes)))


def all_dims(most: int = 3, empty: bool = False) -> st.SearchStrategy[Dims]:
    """Up to ``most`` tensor dims of up to 3 atoms, some of size 1 (no atoms); ``empty``: now and then of size 0."""
    atom = st.sampled_from([2, 3, 4, 5, 8, *([0] if empty else [])])
    row = st.lists(atom, max_size=3).map(tuple)
    return st.lists(row, min_size=1, max_size=most).map(tuple)


def places(dims: Dims) -> list[Shard]:
    """Every run of atoms."""
    return [
        Shard(d, first, length)
        for d, atoms in enumerate(dims)
        for first in range(len(atoms))
        for length in range(1, len(atoms) - first + 1)
    ]


@st.composite
def layouts(draw: Any, dims: Dims, mesh: Mesh, pending: bool = False) -> Layout:
    """A valid layout, nested cuts included; ``pending``: with at most one kind of pending value."""
    reduce = draw(st.sampled_from(["sum", "max", "min"])) if pending else "sum"
    options: list[Placement] = [Replicate(), *places(dims), *([Partial(reduce)] if pending else [])]
    layout: tuple[Placement, ...] = ()
    for _ in mesh.axes:
        fitting = [p for p in options if valid_layout((*layout, p), dims)]
        # nesting into the same run is rare among many runs, and the hardest
        again = [p for p in layout if isinstance(p, Shard)]
        layout = (*layout, draw(st.sampled_from(fitting + 2 * again)))
    return layout


TEXT = st.text(max_size=12)
COUNT = st.integers(0, 2**62)


@st.composite
def programs(draw: Any) -> Program:
    """Well-formed programs of ops that do not exist: SSA, shapes, dims; a single loss."""
    shapes: list[Dims] = []
    types: list[TensorType] = []

    def value(kind: TensorType | None = None) -> int:
        dims = draw(all_dims(2)) if kind is None else whole_dims(kind.shape)
        shapes.append(dims)
        dtype = draw(st.sampled_from(["float32", "int64"]))
        types.append(kind or TensorType(tuple(math.prod(a) for a in dims), dtype))
        return len(types) - 1

    kinds = ["parameter", "buffer", "input", "tangent", "seed"]
    inputs = [
        Input(value(), draw(st.sampled_from(kinds)), f"{draw(TEXT)}{i}",
              tuple(f"tie {i} {j}" for j in range(draw(st.integers(0, 2)))), draw(st.booleans()), draw(st.booleans()))
        for i in range(draw(st.integers(1, 3)))
    ]
    constants = tuple(
        Constant(TensorType((2,), "uint8"), draw(st.binary(min_size=2, max_size=2)))
        for _ in range(draw(st.integers(0, 2)))
    )
    inputs += [Input(value(TensorType((2,), "uint8")), "constant", str(i)) for i in range(len(constants))]
    leaf = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), TEXT, st.just(Dtype("float64")),
                     st.floats(allow_nan=False))
    nodes = []
    for _ in range(draw(st.integers(0, 5))):
        known = st.builds(Ref, st.integers(0, len(types) - 1))
        arg = st.recursive(st.one_of(leaf, known), lambda a: st.lists(a, max_size=3).map(tuple), max_leaves=4)
        args = draw(st.lists(arg, max_size=3).map(tuple))
        nodes.append(Node(f"aten.{draw(TEXT)}.default", args, (value(), -1), draw(st.sampled_from(["forward",
                          "backward"])), draw(TEXT), draw(TEXT)))
    any_value = st.integers(0, len(types) - 1)
    outputs = [Output(draw(any_value), "loss", "loss")]
    outputs += [Output(draw(any_value), "output", draw(TEXT)) for _ in range(draw(st.integers(0, 2)))]
    return Program(tuple(types), tuple(inputs), tuple(nodes), tuple(outputs), tuple(shapes), constants,
                   draw(st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple)), draw(st.lists(TEXT).map(tuple)),
                   draw(st.sampled_from([None, ("value", 0), ("dict", ("loss",), ("value", 0))])))


def predictions() -> st.SearchStrategy[Prediction]:
    total = st.builds(CollectiveTotal, st.sampled_from(["all_reduce", "all_gather"]), TEXT, COUNT, COUNT, COUNT)
    return st.builds(Prediction, *[COUNT] * 9, st.lists(total, max_size=2).map(tuple))


@st.composite
def proofs(draw: Any) -> Proof:
    """Proofs of nothing in particular."""
    vectors = draw(st.lists(st.lists(COUNT, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple))
    links = st.lists(st.integers(0, len(vectors) - 1), max_size=4).map(tuple) if vectors else st.just(())
    return Proof(draw(COUNT), (draw(COUNT), draw(st.integers(1, 2**40))), draw(st.integers(1, 10**6)), vectors,
                 draw(links))


def in_stages(decisions: Decisions) -> Decisions:
    """The decisions with one mesh axis more, of a single stage."""
    mesh = Mesh((*decisions.mesh.axes, Axis("pp", 1)))
    row = ("0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD", "0RESHARD")
    return Decisions(
        mesh, tuple((*c, ".") for c in decisions.choices), tuple((*lay, REPLICATE) for lay in decisions.inputs),
        tuple((*lay, REPLICATE) for lay in decisions.outputs), decisions.recompute,
        pipeline=Pipeline(len(mesh.axes) - 1, (), Schedule("1f1b", 1, 1, (row,))),
    )


@st.composite
def plans(draw: Any) -> Plan:
    """Plans that hold together, of programs that could not run."""
    program = draw(programs())
    mesh = draw(meshes(2))
    decisions = Decisions(
        mesh,
        tuple(draw(st.tuples(*[st.sampled_from([".", "f0", "f1+2", "p0"])] * len(mesh.axes))) for _ in program.nodes),
        tuple(draw(layouts(program.dims[i.value], mesh)) for i in program.inputs),
        tuple(draw(layouts(program.dims[o.value], mesh)) for o in program.outputs),
        tuple(i for i, n in enumerate(program.nodes) if n.phase == "forward" and draw(st.booleans())),
    )
    if draw(st.booleans()):
        decisions = in_stages(decisions)
        mesh = decisions.mesh
    candidates = st.builds(Candidate, TEXT, st.just(mesh), st.booleans(), st.none() | predictions(), TEXT)
    questions = st.builds(
        Question, st.tuples(*[st.sampled_from(["", "dp", "tp"])] * len(mesh.axes)), st.none() | st.booleans(),
        st.none() | st.integers(-2, 2), st.booleans(), st.none() | COUNT,
        st.tuples(*[st.integers(0, 8)] * len(program.inputs)), TEXT, st.binary(max_size=5),
    )
    certificates = st.builds(
        Certificate, st.sampled_from(["optimal", "feasible", "pinned", "random"]), COUNT, COUNT, st.floats(0, 1),
        st.none() | questions, st.none() | proofs(),
        st.none() | st.builds(Overlap, st.integers(0, 4), proofs()),
    )
    pairs = st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple)
    return Plan(
        program, decisions, draw(TEXT), draw(COUNT), draw(predictions()),
        draw(st.lists(candidates, max_size=2).map(tuple)), draw(certificates),
        Fingerprint(draw(TEXT), draw(TEXT), draw(TEXT), draw(TEXT), draw(pairs)), draw(pairs),
        draw(COUNT),
    )
