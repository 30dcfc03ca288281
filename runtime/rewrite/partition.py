"""Cut a local program into forward and backward, with the values that forward keeps for backward.

    y = relu(x); gx = relu_backward(gy, y)   ->   forward(x) = y, saved y;   backward(y, gy) = gx

Recomputed nodes already stand in backward (see ``localise``), so what crosses the cut is exactly what is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpar.plans.program import Program
from fxpar.runtime.local import LocalProgram


@dataclass(frozen=True)
class Halves:
    """A local program in two parts.

    ``forward.inputs`` are all program inputs except the tangent; ``forward.outputs`` the results of ``kept_outputs``
    followed by ``saved``. ``backward.inputs`` are ``saved`` followed by the tangent (if there is one);
    ``backward.outputs`` the results of ``late_outputs``.

    Attributes:
        forward_inputs: positions in ``Program.inputs`` of the forward's inputs.
        kept_outputs: positions in ``Program.outputs`` that forward returns.
        late_outputs: positions in ``Program.outputs`` that backward returns.
        saved: local values that cross, each once; program inputs that backward reads are among them.
    """

    forward: LocalProgram
    backward: LocalProgram
    forward_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    late_outputs: tuple[int, ...]
    saved: tuple[int, ...]


def partition(program: Program, local: LocalProgram) -> Halves:
    """Split ``local``, the (dead-step free) local program of ``program``."""
    tangents = [i for i, entry in enumerate(program.inputs) if entry.kind == "tangent"]
    tangent_values = {local.inputs[i] for i in tangents}
    forward_steps = tuple(s for s in local.steps if s.phase == "forward")
    backward_steps = tuple(s for s in local.steps if s.phase == "backward")
    made_late = {v for s in backward_steps for v in s.writes} | tangent_values
    late = tuple(
        i
        for i, (output, v) in enumerate(zip(program.outputs, local.outputs, strict=True))
        if output.kind == "gradient" or v in made_late
    )
    kept = tuple(i for i in range(len(local.outputs)) if i not in set(late))
    late_values = tuple(local.outputs[i] for i in late)
    read = dict.fromkeys([*(v for s in backward_steps for v in s.reads), *late_values])
    saved = tuple(v for v in read if v not in made_late)
    forward_inputs = tuple(i for i in range(len(program.inputs)) if i not in set(tangents))
    return Halves(
        replace(
            local,
            inputs=tuple(local.inputs[i] for i in forward_inputs),
            steps=forward_steps,
            outputs=(*(local.outputs[i] for i in kept), *saved),
        ),
        replace(
            local, inputs=(*saved, *(local.inputs[i] for i in tangents)), steps=backward_steps, outputs=late_values
        ),
        forward_inputs,
        kept,
        late,
        saved,
    )
