"""One stage of a pipeline as what a rank runs of it: the pieces of :mod:`fxpar.runtime.rewrite.microbatches`, and the
backward of a microbatch in two parts, so that a zero-bubble schedule may run the second later:

    backward     saved, gradients that came in  ->  gradients for the stage before; totals of the weights
    inputs (I)   the steps that gradients for the stage before need
    weights (W)  all others; what it reads of I's results is kept in between

A stage's mesh is the plan's with one rank on the pipeline's axis: what crosses to another stage goes over in the layout
in which it was made, from rank to rank at the same place in the meshes of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxpar.plans.errors import PlanFileError
from fxpar.plans.layout import Layout
from fxpar.plans.mesh import Axis, Mesh
from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program
from fxpar.plans.stages import Stage, Stages, cut_stages, stage_at
from fxpar.rules.choices import choice_by_names, sites_of
from fxpar.runtime.local import LocalProgram, WaitStep
from fxpar.runtime.rewrite.legality import check
from fxpar.runtime.rewrite.microbatches import Pieces, pieces


@dataclass(frozen=True)
class StagePieces:
    """What one rank runs of one stage.

    ``backward`` (``backward_inputs`` and ``backward_weights`` in this order do the same): inputs as those of
    ``pieces.backward``; outputs ``returned``, then those of ``pieces.backward``.
    ``backward_inputs``: outputs ``returned``, then ``between``. ``backward_weights``: outputs as ``pieces.backward``.
    ``epilogue``: outputs the results of ``results`` alone.

    Attributes:
        sent: local values that forward hands to the next stage.
        returned: local values that backward hands to the stage before.
        between: local values that the first part of backward makes for the second.
        results: output positions of the stage's program that are outputs of the whole one.
    """

    stage: Stage
    decisions: Decisions
    pieces: Pieces
    backward: LocalProgram
    backward_inputs: LocalProgram
    backward_weights: LocalProgram
    epilogue: LocalProgram
    sent: tuple[int, ...]
    returned: tuple[int, ...]
    between: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def programs(self) -> tuple[LocalProgram, ...]:
        """Everything that holds collectives, in the order in which it first runs."""
        parts = self.pieces
        return parts.prologue, parts.forward, self.backward_inputs, self.backward_weights, self.epilogue


def stages_of(program: Program, decisions: Decisions) -> Stages:
    """The stages that the decisions cut a program into.

    Raises:
        PlanFileError: they do not fit the program.
    """
    assert decisions.pipeline is not None
    cuts = decisions.pipeline.cuts
    return cut_stages(program, stage_at(program, cuts), len(cuts) + 1)


def stage_mesh(decisions: Decisions) -> Mesh:
    """The mesh of a stage: the same axes, one rank on that of the stages."""
    assert decisions.pipeline is not None
    axes = decisions.mesh.axes
    return Mesh(tuple(Axis(a.name, 1 if i == decisions.pipeline.axis else a.size) for i, a in enumerate(axes)))


def stage_decisions(program: Program, decisions: Decisions, stages: Stages) -> tuple[Decisions, ...]:
    """Per stage the decisions of its own program, on the mesh of a stage.

    Raises:
        PlanFileError: a choice is not one that its op offers.
    """
    mesh = stage_mesh(decisions)
    made = dict(_made_layouts(program, decisions, stages, mesh))
    found = []
    for stage in stages.stages:
        place = {whole: n for n, whole in enumerate(stage.nodes)}
        inputs = tuple(
            decisions.inputs[i] if i >= 0 else made[stage.values[entry.value]]
            for entry, i in zip(stage.program.inputs, stage.inputs, strict=True)
        )
        outputs = tuple(
            decisions.outputs[o] if o >= 0 else made[stage.values[output.value]]
            for output, o in zip(stage.program.outputs, stage.outputs, strict=True)
        )
        found.append(Decisions(
            mesh, tuple(decisions.choices[n] for n in stage.nodes), inputs, outputs,
            tuple(place[n] for n in decisions.recompute if n in place),
            reduce_each=tuple(p for p, o in enumerate(stage.outputs) if o >= 0 and o in decisions.reduce_each),
            held=tuple(p for p, i in enumerate(stage.inputs) if i >= 0 and i in decisions.held),
            reuse=_reuse(decisions, stage, place),
        ))
    return tuple(found)


def _reuse(decisions: Decisions, stage: Stage, place: dict[int, int]) -> tuple[int, ...]:
    """The backward hubs of a stage that keep a copy: those whose forward hub is in the stage too."""
    from fxpar.plans.lifetimes import hub_partners

    partners = hub_partners(stage.program) if decisions.reuse else {}
    return tuple(sorted(place[n] for n in decisions.reuse if n in place and place[n] in partners))


def _made_layouts(
    program: Program, decisions: Decisions, stages: Stages, mesh: Mesh
) -> Iterator[tuple[int, Layout]]:
    """(value, the layout its op leaves it in) of every value that crosses to another stage."""
    crossing = {
        stage.values[stage.program.outputs[o].value] for stage in stages.stages
        for o in (*stage.sent, *stage.gradients_sent)
    }
    sites = sites_of(program)
    for index, node in enumerate(program.nodes):
        if crossing.isdisjoint(node.outputs):
            continue
        choice = choice_by_names(sites[index], decisions.choices[index], mesh)
        if choice is None:
            raise PlanFileError(
                f"the plan's choice {decisions.choices[index]} is not one that {node.op} offers", where=node.module
            )
        for value, layout in zip(node.outputs, choice.outputs, strict=True):
            if value in crossing:
                yield value, layout


def stage_pieces(stage: Stage, decisions: Decisions, coords: tuple[int, ...]) -> StagePieces:
    """What the rank at ``coords`` of the stage's mesh runs; ``decisions`` are those of the stage.

    Raises:
        PlanFileError: the decisions do not fit the stage's program.
    """
    parts = pieces(stage.program, decisions, coords)
    local_outputs = parts.epilogue.outputs
    sent = tuple(local_outputs[o] for o in stage.sent)
    returned = tuple(local_outputs[o] for o in stage.gradients_sent)
    results = tuple(p for p, o in enumerate(stage.outputs) if o >= 0)
    backward = check(replace(parts.backward, outputs=(*returned, *parts.backward.outputs)))
    first, second, between = split_backward(parts.backward, returned)
    epilogue = replace(parts.epilogue, outputs=tuple(local_outputs[p] for p in results))
    needed = {v for s in epilogue.steps for v in s.reads} | set(epilogue.outputs)
    epilogue = check(replace(epilogue, inputs=tuple(v for v in epilogue.inputs if v in needed)))
    return StagePieces(stage, decisions, parts, backward, first, second, epilogue, sent, returned, between, results)


def split_backward(
    backward: LocalProgram, returned: tuple[int, ...]
) -> tuple[LocalProgram, LocalProgram, tuple[int, ...]]:
    """(the steps that make ``returned``, all others, what the second part reads of the first's results).

        g = mm(gy, w); gw = mm(t(x), gy)   ->   I: g = mm(gy, w)   W: gw = mm(t(x), gy)
    """
    wanted, first_steps, second_steps = set(returned), [], []
    for step in reversed(backward.steps):
        # a wait goes with the collective whose results it names
        if wanted.isdisjoint(step.values if isinstance(step, WaitStep) else step.writes):
            second_steps.append(step)
        else:
            first_steps.append(step)
            wanted.update(step.reads)
    first_steps.reverse()
    second_steps.reverse()
    made = {v for s in first_steps for v in s.writes}
    read = dict.fromkeys([*(v for s in second_steps for v in s.reads), *backward.outputs])
    between = tuple(v for v in read if v in made)
    first_reads = {v for s in first_steps for v in s.reads} | set(returned)
    first = replace(
        backward, inputs=tuple(v for v in backward.inputs if v in first_reads), steps=tuple(first_steps),
        outputs=(*returned, *between),
    )
    second = replace(
        backward, inputs=(*(v for v in backward.inputs if v in read), *between), steps=tuple(second_steps),
    )
    return check(first), check(second), between
