"""Programs of small models under passes with small limits, so that reductions exceed what may be under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fxpar.runtime.local import CollectiveStep, LocalProgram
from fxpar.runtime.rewrite import microbatches, passes
from fxpar.runtime.rewrite.bucket import bucket_gathers, bucket_reductions, free_reductions
from fxpar.runtime.rewrite.dead import remove_dead_steps
from fxpar.runtime.rewrite.in_flight import bound_reductions
from fxpar.runtime.rewrite.prefetch import prefetch_gathers


@contextmanager
def tight_bound(bucket: int = 0, limit: int = 0) -> Iterator[None]:
    """Rewrites within use buckets and a bound of so many bytes, also in processes that are forked within."""
    before = passes.PASSES
    tight = (remove_dead_steps, partial(bucket_gathers, limit=bucket), partial(bucket_reductions, limit=bucket),
             prefetch_gathers, partial(bound_reductions, limit=limit))
    passes.PASSES = microbatches.PASSES = tight
    try:
        yield
    finally:
        passes.PASSES = microbatches.PASSES = before


def under_way(before: LocalProgram, after: LocalProgram) -> list[list[CollectiveStep]]:
    """Whenever ``after`` issues a reduction whose result nothing in ``before`` needs: all such that are under way."""
    free = free_reductions(before)
    pending: dict[int, CollectiveStep] = {}
    found = []
    for step in after.steps:
        for maker in [pending[v] for v in step.reads if v in pending]:
            for value in maker.outputs:
                pending.pop(value, None)
        if id(step) in free:
            assert isinstance(step, CollectiveStep)
            pending = {v: s for v, s in pending.items() if s.phase == step.phase}
            pending.update(dict.fromkeys(step.outputs, step))
            found.append(list({id(s): s for s in pending.values()}.values()))
    return found
