"""Large arrays are worked on by several threads: numpy lets go of the interpreter while it computes.

The results are those of a plain loop, in its order; how many threads there are decides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Array entries in all below which threads take longer to begin than they spare.
LARGE = 2_000_000
MOST_THREADS = 8


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item], entries: int) -> list[Result]:
    """`[work(item) for item in items]`. entries: array entries that this goes through, about; `work` must not write to
    what another item's reads, and raises what the loop would raise."""
    threads = min(_cores(), MOST_THREADS, len(items))
    if entries < LARGE or threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
