"""Ranks that are forks of this process, which has everything imported: started in milliseconds, torchrun in seconds.

The same ranks otherwise: processes of their own that meet through the same environment variables.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from fxpar.ranks import FOLDER, RanksEnd, end_as_rank


def forked_ranks(count: int, body: Callable[[], None], folder: Path, *, timeout: float) -> RanksEnd:
    """Run ``body`` on ``count`` ranks; as ``fxpar.ranks.run_ranks``, messages of failed ranks stay in ``folder``.

    Args:
        timeout: seconds until all of them are stopped; they are stopped, too, when one has failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gc.collect()
    children = [fork_rank(rank, count, port, body, folder) for rank in range(count)]
    end, codes = time.monotonic() + timeout, dict.fromkeys(children, None)
    while None in codes.values() and time.monotonic() < end and not any(codes.values()):
        for child in [c for c, code in codes.items() if code is None]:
            done, status = os.waitpid(child, os.WNOHANG)
            codes[child] = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.02)
    for child in [c for c, code in codes.items() if code is None]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    messages = [(r, (folder / f"rank{r}").read_text()) for r in range(count) if (folder / f"rank{r}").exists()]
    failed = [code for code in codes.values() if code]
    return RanksEnd(None if None in codes.values() and not failed else max(failed, default=0), tuple(messages), "")


def fork_rank(rank: int, count: int, port: int, body: Callable[[], None], folder: Path) -> int:
    """The process id of a new rank; the rank itself does not return."""
    child = os.fork()
    if child == 0:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), **{FOLDER: str(folder)},
        )  # fmt: skip
        end_as_rank(body)
    return child
