"""Join all-reduces that nothing waits for into buckets.

    g1 = all_reduce(p1); g2 = all_reduce(p2); return g1, g2   ->   g1, g2 = all_reduce(p1, p2); return g1, g2

Candidates are all-reduces whose results are only read by outputs or by further candidates (an all-reduce over two
axes is a chain of two). A bucket goes out when its last member is ready: small ones travel together, and what is
ready early travels while backward still computes.
"""

from __future__ import annotations

from dataclasses import replace

from fxpar.runtime.local import AnyStep, CollectiveStep, LocalProgram

BUCKET_BYTES = 25 * 2**20

_Key = tuple[int, int, str, str, str]


def bucket_all_reduces(local: LocalProgram, limit: int = BUCKET_BYTES) -> LocalProgram:
    """``local`` with its free all-reduces joined into buckets of at most ``limit`` bytes (a larger one stays alone).

    Sizes are those of the largest rank, so that every rank makes the same buckets.
    """
    free = _free_all_reduces(local)
    depth: dict[int, int] = {}
    pending: dict[_Key, list[CollectiveStep]] = {}
    waiting: dict[int, list[CollectiveStep]] = {}  # by the result of a bucket that is not sent yet
    unsent: set[int] = set()
    steps: list[AnyStep] = []

    def add(step: CollectiveStep) -> None:
        level = depth.get(step.values[0], 0)
        depth[step.outputs[0]] = level + 1
        key = (level, step.axis, step.reduce, step.dtype, step.phase)
        if key in pending and sum(s.bytes for s in pending[key]) + step.bytes > limit:
            flush(key)
        pending.setdefault(key, []).append(step)

    def flush(key: _Key) -> None:
        bucket = pending.pop(key)
        steps.append(
            replace(
                bucket[0],
                values=tuple(s.values[0] for s in bucket),
                outputs=tuple(s.outputs[0] for s in bucket),
                elements=sum(s.elements for s in bucket),
            )
        )
        for step in bucket:
            unsent.discard(step.outputs[0])
            for reader in waiting.pop(step.outputs[0], ()):
                add(reader)

    for step in local.steps:
        if not (isinstance(step, CollectiveStep) and id(step) in free):
            steps.append(step)
            continue
        unsent.update(step.outputs)
        if step.values[0] in unsent:
            waiting.setdefault(step.values[0], []).append(step)
        else:
            add(step)
    while pending:
        flush(min(pending))
    return replace(local, steps=tuple(steps))


def _free_all_reduces(local: LocalProgram) -> set[int]:
    """Identities of the all-reduces whose results only outputs or other free all-reduces read."""
    readers: dict[int, list[AnyStep]] = {}
    for step in local.steps:
        for value in set(step.reads):
            readers.setdefault(value, []).append(step)
    free: set[int] = set()
    for step in reversed(local.steps):
        if isinstance(step, CollectiveStep) and step.kind == "all_reduce" and len(step.values) == 1:
            if all(id(reader) in free for reader in readers.get(step.outputs[0], ())):
                free.add(id(step))
    return free
