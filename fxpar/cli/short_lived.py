"""What a process that serves one command may do because it ends soon.

The solver makes and frees arrays of megabytes thousands of times. By default glibc maps each anew and gives it back,
and the kernel clears every page again: two thirds of the time of what is done with such an array. Freed memory stays
with the process here; its peak is what it was. And Python need not look for reference cycles among millions of objects
when all of them go.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys

# <malloc.h>: the parameters of mallopt, and sizes no array of ours reaches
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
NEVER = 2**30


def short_lived() -> None:
    """To be called before a command's work."""
    keep_freed_memory()
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def keep_freed_memory() -> bool:
    """Asks the C library for it, for all threads alike; False where it is not glibc, which changes nothing."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_ARENA_MAX, 1) and mallopt(M_MMAP_THRESHOLD, NEVER) and mallopt(M_TRIM_THRESHOLD, NEVER))
