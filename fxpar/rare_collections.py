"""Fewer searches for reference cycles while a plan is made.

A compile allocates millions of small objects that stay (nodes, table entries, imported modules); by default Python
looks through them again for every 700 new ones, which was an eighth of a compile's time. Reference counts free what
matters here; what only a cycle holds (a traced graph) waits a little longer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

ALLOCATIONS = 1_000_000
"""New objects before Python looks for cycles among them: some 100 MB of small ones at most."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Looks for cycles rarely inside; afterwards as often as before. Where a caller turned that off or made it rarer,
    nothing changes."""
    before = gc.get_threshold()
    if before[0] and before[0] < ALLOCATIONS:
        gc.set_threshold(ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
