"""A step of a program that is cut into stages, one stage after the other in one process, op by op."""

from __future__ import annotations

import torch

from fxpar.plans.program import Program, node_inputs
from fxpar.plans.stages import Stages
from fxpar.runtime.interpret import call, concrete, constant_tensor


def run_phase(program: Program, phase: str, known: dict) -> None:
    """Run the nodes of one phase; ``known`` is added to."""
    for node in program.nodes:
        if node.phase == phase:
            result = call(node.op, [concrete(arg, known) for arg in node.args], None)
            results = result if isinstance(result, tuple | list) else (result,)
            known.update((v, t) for v, t in zip(node.outputs, results, strict=True) if v >= 0)


@torch.no_grad()
def run_stages(program: Program, cut: Stages, values: dict) -> list:
    """One tensor per program output; a gradient that has parts in several stages is their sum, the owner's last."""
    known: list[dict] = []
    carried: list = []
    for stage in cut.stages:
        mine = {}
        for local, (entry, position) in enumerate(zip(stage.program.inputs, stage.inputs, strict=True)):
            if position >= 0:
                constant = entry.kind == "constant"
                whole = program.inputs[position].value
                mine[entry.value] = constant_tensor(program.constants[int(entry.name)]) if constant else values[whole]
            assert (position < 0) == (local in (*stage.received, *stage.gradients_received))
        assert len(carried) == len(stage.received)
        mine.update(zip((stage.program.inputs[i].value for i in stage.received), carried, strict=True))
        run_phase(stage.program, "forward", mine)
        carried = [mine[stage.program.outputs[o].value] for o in stage.sent]
        known.append(mine)
    assert not carried
    found: dict[int, list] = {}
    for stage, mine in zip(reversed(cut.stages), reversed(known), strict=True):
        assert len(carried) == len(stage.gradients_received)
        mine.update(zip((stage.program.inputs[i].value for i in stage.gradients_received), carried, strict=True))
        run_phase(stage.program, "backward", mine)
        carried = [mine[stage.program.outputs[o].value] for o in stage.gradients_sent]
        for output, position in zip(stage.program.outputs, stage.outputs, strict=True):
            if position >= 0:
                found.setdefault(position, []).append(mine[output.value])
    assert not carried
    return [sum(parts[1:], parts[0]) for _, parts in sorted(found.items())]


def nodes_read(program: Program) -> set[int]:
    return {v for node in program.nodes for v in node_inputs(node)} | {o.value for o in program.outputs}
