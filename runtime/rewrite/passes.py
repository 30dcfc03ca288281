"""The rewrite: every pass in order, legality checked after each."""

from __future__ import annotations

from collections.abc import Callable

from fxpar.plans.plan import Decisions
from fxpar.plans.program import Program
from fxpar.runtime.local import LocalProgram
from fxpar.runtime.rewrite.bucket import bucket_gathers, bucket_reductions
from fxpar.runtime.rewrite.dead import remove_dead_steps
from fxpar.runtime.rewrite.in_flight import bound_reductions
from fxpar.runtime.rewrite.legality import check
from fxpar.runtime.rewrite.localise import localise
from fxpar.runtime.rewrite.prefetch import prefetch_gathers

PASSES: tuple[Callable[[LocalProgram], LocalProgram], ...] = (
    remove_dead_steps, bucket_gathers, bucket_reductions, prefetch_gathers, bound_reductions,
)


def rewrite(
    program: Program, decisions: Decisions, coords: tuple[int, ...], *, every_pass: bool = True
) -> LocalProgram:
    """What the rank at ``coords`` runs, forward and backward in one list (see ``partition`` for the cut).

    ``every_pass``: legality is checked after each pass, else once at the end.

    Simulate, verify and the runtime all use this one function: the program that is priced is the one that runs.

    Raises:
        PlanFileError: the decisions do not fit the program.
    """
    local = localise(program, decisions, coords)
    for one in PASSES:
        local = one(check(local) if every_pass else local)
    return check(local)
