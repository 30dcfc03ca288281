"""Small hand-made programs, a plain interpreter for them, and random decisions."""

import random

import torch

from fxpar.plans.layout import Shard, replicated, valid_layout
from fxpar.plans.lifetimes import hub_partners, keep_copies
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Arg, Input, Node, Output, Program, Ref, TensorType
from fxpar.rules.choices import joint_choices, site_of
from fxpar.runtime.surface import torch_placements


class ProgramBuilder:
    """Writes a Program op by op; values are ints."""

    def __init__(self):
        self.types, self.dims, self.inputs, self.nodes, self.outputs = [], [], [], [], []

    def value(self, dims, dtype):
        shape = tuple(torch.Size([int(torch.tensor(a).prod()) if a else 1 for a in dims]))
        self.types.append(TensorType(shape, dtype))
        self.dims.append(dims)
        return len(self.types) - 1

    def input(self, kind, name, dims, dtype="float64", **rest):
        v = self.value(dims, dtype)
        self.inputs.append(Input(v, kind, name, **rest))
        return v

    def op(self, op, *args: Arg, dims, dtype="float64", phase="forward"):
        v = self.value(dims, dtype)
        self.nodes.append(Node(op, args, (v,), phase))
        return v

    def output(self, value, kind, name):
        self.outputs.append(Output(value, kind, name))

    def program(self, **rest):
        return Program(
            tuple(self.types), tuple(self.inputs), tuple(self.nodes), tuple(self.outputs), tuple(self.dims), **rest
        )


def two_layers(batch=6, inner=8, hidden=10, out=4, atoms=None):
    """loss = sum(relu(x w1) w2 * t); both weights train. ``atoms``: logical dims of the batch."""
    p = ProgramBuilder()
    b = atoms or (batch,)
    x = p.input("input", "x", (b, (inner,)))
    t = p.input("input", "t", (b, (out,)))
    w1 = p.input("parameter", "w1", ((inner,), (hidden,)), requires_grad=True)
    w2 = p.input("parameter", "w2", ((hidden,), (out,)), requires_grad=True)
    tangent = p.input("tangent", "tangent", ())
    mm, relu, mul = "aten.mm.default", "aten.relu.default", "aten.mul.Tensor"
    h = p.op(mm, Ref(x), Ref(w1), dims=(b, (hidden,)))
    r = p.op(relu, Ref(h), dims=(b, (hidden,)))
    y = p.op(mm, Ref(r), Ref(w2), dims=(b, (out,)))
    yt = p.op(mul, Ref(y), Ref(t), dims=(b, (out,)))
    loss = p.op("aten.sum.dim_IntList", Ref(yt), (0, 1), False, None, dims=())
    back = {"phase": "backward"}
    gy = p.op(mul, Ref(t), Ref(tangent), dims=(b, (out,)), **back)
    rt = p.op("aten.permute.default", Ref(r), (1, 0), dims=((hidden,), b), **back)
    gw2 = p.op(mm, Ref(rt), Ref(gy), dims=((hidden,), (out,)), **back)
    w2t = p.op("aten.permute.default", Ref(w2), (1, 0), dims=((out,), (hidden,)), **back)
    gr = p.op(mm, Ref(gy), Ref(w2t), dims=(b, (hidden,)), **back)
    gh = p.op("aten.threshold_backward.default", Ref(gr), Ref(r), 0, dims=(b, (hidden,)), **back)
    xt = p.op("aten.permute.default", Ref(x), (1, 0), dims=((inner,), b), **back)
    gw1 = p.op(mm, Ref(xt), Ref(gh), dims=((inner,), (hidden,)), **back)
    p.output(loss, "loss", "loss")
    p.output(y, "output", "y")
    p.output(gw1, "gradient", "w1")
    p.output(gw2, "gradient", "w2")
    return p.program(call=("x", "t"), structure=("dict", ("loss", "y"), ("value", 0), ("value", 1)))


def global_inputs(program, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        i.value: torch.randn(program.types[i.value].shape, generator=generator, dtype=torch.float64)
        for i in program.inputs
    }


def random_layout(dims, mesh: Mesh, rng: random.Random, sayable=False):
    """Any valid layout; runs of atoms of every length. ``sayable``: in torch's placements."""
    places = [
        Shard(d, first, length)
        for d, atoms in enumerate(dims)
        for first in range(len(atoms))
        for length in range(1, len(atoms) - first + 1)
    ]
    for _ in range(100):
        layout = tuple(
            rng.choice([replicated(mesh)[0], *places]) for _ in mesh.axes
        )
        if valid_layout(layout, dims) and (not sayable or torch_placements(layout, dims, mesh) is not None):
            return layout
    return replicated(mesh)


def random_decisions(program, mesh, rng: random.Random, recompute=False, sayable=False, reuse=True):
    """Any feasible choice per node, any stored layout, gradients in their parameter's layout.

    ``sayable``: layouts at the surface are such that a plan may have them. ``reuse``: some copies
    are kept for backward.
    """
    choices = tuple(rng.choice(joint_choices(site_of(n, program), mesh)).names for n in program.nodes)
    stored = {
        i.value: replicated(mesh)
        if sayable and i.kind not in ("parameter", "input")
        else random_layout(program.dims[i.value], mesh, rng, sayable=sayable)
        for i in program.inputs
    }
    by_name = {i.name: stored[i.value] for i in program.inputs}
    outputs = tuple(
        by_name[o.name]
        if o.kind == "gradient"
        else random_layout(program.dims[o.value], mesh, rng, sayable=sayable)
        if o.kind == "output"
        else replicated(mesh)
        for o in program.outputs
    )
    forward = [i for i, n in enumerate(program.nodes) if n.phase == "forward"]
    again = tuple(i for i in forward if recompute and rng.random() < 0.5)
    decisions = Decisions(mesh, choices, tuple(stored[i.value] for i in program.inputs), outputs, again)
    hubs = [h for h in hub_partners(program) if reuse and rng.random() < 0.5]
    return keep_copies(program, decisions, hubs)


def pure_data_parallel(program, mesh):
    """Batch split over the mesh's only axis, parameters replicated: choices named by their effect on operand 0."""
    choices = []
    batch = {}
    stored = tuple((Shard(0),) if i.kind == "input" else replicated(mesh) for i in program.inputs)
    for i, layout in zip(program.inputs, stored, strict=True):
        batch[i.value] = layout
    for node in program.nodes:
        site = site_of(node, program)
        values = [r for a in node.args for r in _refs(a)]
        fits = [j for j in joint_choices(site, mesh) if list(j.inputs) == [batch[v] for v in values]]
        pick = fits[0]
        choices.append(pick.names)
        for v, layout in zip(node.outputs, pick.outputs, strict=True):
            batch[v] = layout
    outputs = tuple(replicated(mesh) if o.kind in ("loss", "gradient") else batch[o.value] for o in program.outputs)
    return Decisions(mesh, tuple(choices), stored, outputs)


def _refs(arg):
    if isinstance(arg, Ref):
        return [arg.id]
    return [r for a in arg for r in _refs(a)] if isinstance(arg, tuple) else []
