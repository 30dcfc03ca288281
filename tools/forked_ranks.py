"""Ranks that are forks of this process, which has everything imported: started in milliseconds, torchrun in seconds.

The same ranks otherwise: processes of their own that meet through the same environment variables. The port where they
meet is opened here and handed to the first of them, so that no one else can be given it meanwhile.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from fxpar.ranks import FOLDER, RanksEnd, end_as_rank


def forked_ranks(count: int, body: Callable[[], None], folder: Path, *, timeout: float) -> RanksEnd:
    """Run ``body`` on ``count`` ranks; as ``fxpar.ranks.run_ranks``, messages of failed ranks stay in ``folder``.

    Args:
        timeout: seconds until all of them are stopped; they are stopped, too, when one has failed.
    """
    gc.collect()
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen(count)
        children = [_fork_rank(rank, count, door, body, folder) for rank in range(count)]
    end, codes = time.monotonic() + timeout, dict.fromkeys(children, None)
    while None in codes.values() and time.monotonic() < end and not any(codes.values()):
        for child in [c for c, code in codes.items() if code is None]:
            done, status = os.waitpid(child, os.WNOHANG)
            codes[child] = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0.02)
    for child in [c for c, code in codes.items() if code is None]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    messages = [(r, said) for r, child in enumerate(children) if (said := _message(folder, r, codes[child]))]
    failed = [abs(code) for code in codes.values() if code]
    return RanksEnd(None if None in codes.values() and not failed else max(failed, default=0), tuple(messages), "")


def _message(folder: Path, rank: int, code: int | None) -> str:
    """What a rank said of its end; of one that a signal killed, which signal and where its threads were."""
    told, stacks = folder / f"rank{rank}", folder / f"stacks{rank}"
    if told.exists():
        return told.read_text()
    if code is None or code >= 0:
        return ""
    return f"killed by {signal.Signals(-code).name}\n{stacks.read_text() if stacks.exists() else ''}".rstrip()


def _fork_rank(rank: int, count: int, door: socket.socket, body: Callable[[], None], folder: Path) -> int:
    """The process id of a new rank; the rank itself does not return. ``door``: where the ranks meet; the first keeps
    their store, and all of them are its clients, as under torchrun."""
    child = os.fork()
    if child == 0:
        port = door.getsockname()[1]
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
            **{FOLDER: str(folder)},
        )  # fmt: skip
        # never closed: the process ends without leaving this function
        faulthandler.enable((folder / f"stacks{rank}").open("w"))
        kept = []
        if rank == 0:
            kept.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                                      master_listen_fd=os.dup(door.fileno())))
        door.close()
        end_as_rank(body)
    return child
