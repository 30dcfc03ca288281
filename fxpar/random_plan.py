"""Any feasible plan, drawn: what soundness tests run."""

from __future__ import annotations

import random

import msgspec

from fxpar.constraints import Applied, filters
from fxpar.formulate import output_layouts
from fxpar.layers import tie_layers
from fxpar.plans.lifetimes import hub_partners, keep_copies
from fxpar.plans.mesh import Mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program
from fxpar.rules.choices import joint_choices
from fxpar.stored import stored_layouts


def random_decisions(program: Program, mesh: Mesh, seed: int, applied: Applied | None = None) -> Decisions:
    """Any feasible decisions that obey the constraints: a uniformly drawn choice for every node and input, layers not
    tied, any set of forward nodes that run again, and any set of copies of parameters kept for backward; where
    microbatches repeat, any set of gradients reduced by each, and of parameters whose copies are held."""
    draw = random.Random(seed)
    classes = tie_layers(program, tied=False)
    of_node, of_input = filters(None, applied)
    every = [joint_choices(site, mesh) for site in classes.sites]
    stored = [stored_layouts(i, program.dims[i.value], mesh) for i in program.inputs]
    choices = tuple(
        draw.choice(of_node(n, classes.sites[n], c) if of_node is not None else c).names for n, c in enumerate(every)
    )
    inputs = tuple(draw.choice(of_input(n, s) if of_input is not None else s) for n, s in enumerate(stored))
    share = draw.choice((0.0, 0.3, 0.7))
    again = tuple(n for n, node in enumerate(program.nodes) if node.phase == "forward" and draw.random() < share)
    decisions = Decisions(mesh, choices, inputs, output_layouts(program, inputs, mesh), again)
    share = draw.choice((0.0, 0.5, 1.0))
    if applied is not None and applied.constraints.reuse != "free":
        share = 0.0 if applied.constraints.reuse == "never" else 1.0
    keep = [n for n, partner in hub_partners(program).items() if draw.random() < share and (
        of_node is None or choices[partner] in {c.names for c in of_node(n, classes.sites[n], every[n])})]
    decisions = keep_copies(program, decisions, keep)
    if program.time is None:
        return decisions
    gradients = (i for i, o in enumerate(program.outputs) if o.kind == "gradient")
    parameters = (i for i, e in enumerate(program.inputs) if e.kind == "parameter")
    each, held = draw.choice((0.0, 0.5, 1.0)), draw.choice((0.0, 0.5, 1.0))
    return msgspec.structs.replace(
        decisions, reduce_each=tuple(i for i in gradients if draw.random() < each),
        held=tuple(i for i in parameters if draw.random() < held),
    )
