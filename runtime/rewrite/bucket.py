"""Join collectives that need not travel alone: many small ones cost far more than one large.

A reduction is free when its result is only read by outputs or by further free reductions (a gradient over two axes is
a chain of two): it may travel late, with others.

    g1 = all_reduce(p1); g2 = all_reduce(p2); return g1, g2   ->   g1, g2 = all_reduce(p1, p2); return g1, g2

A gathering is free when it gathers a program input (a stored parameter): it may travel early, with others.

    w1 = all_gather(s1); y = f(w1); w2 = all_gather(s2)   ->   w1, w2 = all_gather(s1, s2); y = f(w1)

Sizes are those of the largest rank, so that every rank makes the same buckets.
"""

from __future__ import annotations

from dataclasses import replace

from fxpar.runtime.local import AnyStep, CollectiveStep, LocalProgram

BUCKET_BYTES = 25 * 2**20

_Key = tuple[int, str, int, str, str, str]


def joined(bucket: list[CollectiveStep]) -> CollectiveStep:
    """One step that does what all steps of the bucket do."""
    return replace(
        bucket[0],
        values=tuple(v for s in bucket for v in s.values),
        outputs=tuple(v for s in bucket for v in s.outputs),
        geometries=tuple(g for s in bucket for g in s.geometries),
        elements=sum(s.elements for s in bucket),
    )


def bucket_gathers(local: LocalProgram, limit: int = BUCKET_BYTES) -> LocalProgram:
    """``local`` with gatherings of program inputs joined into buckets of at most ``limit`` gathered bytes.

    A bucket goes out where its first member stood; the limit bounds what is gathered before it is used.
    """
    inputs = set(local.inputs)
    place: dict[_Key, int] = {}
    steps: list[AnyStep | list[CollectiveStep]] = []
    for step in local.steps:
        if not (isinstance(step, CollectiveStep) and step.kind == "all_gather" and step.values[0] in inputs):
            steps.append(step)
            continue
        key = (0, step.kind, step.axis, step.reduce, step.dtype, step.phase)
        bucket = steps[place[key]] if key in place else None
        if isinstance(bucket, list) and sum(s.bytes for s in bucket) + step.bytes <= limit:
            bucket.append(step)
        else:
            place[key] = len(steps)
            steps.append([step])
    return replace(local, steps=tuple(joined(s) if isinstance(s, list) else s for s in steps))


def bucket_reductions(local: LocalProgram, limit: int = BUCKET_BYTES) -> LocalProgram:
    """``local`` with its free reductions joined into buckets of at most ``limit`` bytes (a larger one stays alone).

    A bucket goes out when it is full, or at the end: what is ready early travels while backward still computes.
    """
    free = free_reductions(local)
    depth: dict[int, int] = {}
    pending: dict[_Key, list[CollectiveStep]] = {}
    waiting: dict[int, list[CollectiveStep]] = {}  # by the result of a bucket that is not sent yet
    unsent: set[int] = set()
    steps: list[AnyStep] = []

    def add(step: CollectiveStep) -> None:
        level = depth.get(step.values[0], 0)
        depth[step.outputs[0]] = level + 1
        key = (level, step.kind, step.axis, step.reduce, step.dtype, step.phase)
        if key in pending and sum(s.bytes for s in pending[key]) + step.bytes > limit:
            flush(key)
        pending.setdefault(key, []).append(step)

    def flush(key: _Key) -> None:
        bucket = pending.pop(key)
        steps.append(joined(bucket))
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


def free_reductions(local: LocalProgram) -> set[int]:
    """Identities of the reductions whose results only outputs or other free reductions read."""
    readers: dict[int, list[AnyStep]] = {}
    for step in local.steps:
        for value in set(step.reads):
            readers.setdefault(value, []).append(step)
    free: set[int] = set()
    for step in reversed(local.steps):
        if isinstance(step, CollectiveStep) and step.kind in ("all_reduce", "reduce_scatter"):
            if all(id(reader) in free for v in step.outputs for reader in readers.get(v, ())):
                free.add(id(step))
    return free
