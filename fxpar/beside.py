"""Work in a process beside this one, where there is a core for it: the same result as doing it here, sooner."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


def beside(work: Callable[[], T], *, worthwhile: bool = True) -> Callable[[], T]:
    """Begins ``work`` in a forked process and returns a function that waits for its result.

    Where that is not worthwhile, there is no second core or no fork, and where the process ends without a result (an
    error in ``work`` among others), the function does the work itself: errors come from there.

    Args:
        work: without side effects; what it returns can be pickled. It must not use threads that this process started.
    """
    if not (worthwhile and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1):
        return work
    forking = multiprocessing.get_context("fork")
    receive, send = forking.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process = forking.Process(target=_send_result, args=(work, send), daemon=True)
    process.start()
    send.close()

    def result() -> T:
        try:
            found: T = receive.recv()
        except EOFError:  # it ended without a result
            return work()
        finally:
            receive.close()
            process.join()
        return found

    return result


def _send_result(work: Callable[[], T], send: Connection) -> None:
    try:
        result = work()
    except Exception:  # the same error is met where the result is asked for
        os._exit(1)
    try:
        send.send(result)
    except BrokenPipeError:  # no one waits for it any more
        os._exit(1)
    send.close()
