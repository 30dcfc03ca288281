"""Start real gloo ranks for a test and collect what each returns."""

import os
import pickle
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.multiprocessing as mp


def run_ranks(function, world, *args, timeout=120):
    """``function(rank, *args)`` on ``world`` gloo ranks: what each returned, or the exception it raised."""
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            _rank, args=(world, folder, function, args), nprocs=world, join=False, start_method="spawn"
        )
        # a rank that raised has written its exception and ended normally
        end = time.monotonic() + timeout
        while not processes.join(max(0.0, end - time.monotonic())) and time.monotonic() < end:
            pass  # one call returns when the first rank ends, and the others may still be writing
        for process in processes.processes:
            if process.is_alive():
                process.kill()
        found = []
        for rank in range(world):
            path = Path(folder) / f"result{rank}"
            found.append(pickle.loads(path.read_bytes()) if path.exists() else TimeoutError(f"rank {rank} hangs"))
        return found


def _rank(rank, world, folder, function, args):
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        result = function(rank, *args)
    except Exception as error:
        result = error
    except BaseException as error:  # what pytest.raises says when nothing was raised
        result = AssertionError(str(error))
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
    os._exit(0)  # no goodbye: a rank that failed must not wait for the others


def values(found):
    """The results; the first exception of any rank is raised."""
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found
