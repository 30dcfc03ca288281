"""Remove steps whose results nobody reads.

    y = mm(x, w); w1 = all_gather(w); return y   ->   y = mm(x, w); return y

Liveness looks at ``OpStep.operands``, not at the rank's args, so that all ranks drop the same collectives.
"""

from __future__ import annotations

from dataclasses import replace

from fxpar.runtime.local import AnyStep, LocalProgram


def remove_dead_steps(local: LocalProgram) -> LocalProgram:
    """``local`` without steps that no output needs; value numbers stay."""
    live = set(local.outputs)
    kept: list[AnyStep] = []
    for step in reversed(local.steps):
        if any(v in live for v in step.writes):
            kept.append(step)
            live.update(step.reads)
    return replace(local, steps=tuple(reversed(kept)))
