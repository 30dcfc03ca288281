"""Ranks started by torchrun: how they end is known, whatever they do, and nothing stays behind."""

import time

from fxpar.ranks import run_ranks

WORKER = """
import atexit, os, sys, time
from fxpar.plans.errors import FxparError
from fxpar.ranks import end_as_rank

def body():
    rank = int(os.environ["RANK"])
    open(sys.argv[2] + f"/{rank}", "w").write(os.environ["OMP_NUM_THREADS"])
    if sys.argv[1] == "fail" and rank == 1:
        raise FxparError("the inputs are wrong", numbers="on this rank")
    if sys.argv[1] == "odd" and rank == 1:
        raise KeyError("lost")
    if sys.argv[1] == "abort" and rank == 1:
        os.abort()
    if sys.argv[1] == "leave":
        atexit.register(os.abort)  # what a thread that outlives the interpreter does to a process
    if sys.argv[1] in ("fail", "odd", "hang", "abort"):
        time.sleep(120)

end_as_rank(body)
"""


def start(tmp_path, repository, how, timeout=60.0):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return run_ranks(2, [str(script), how, str(tmp_path)], timeout=timeout, env={"PYTHONPATH": str(repository)})


def test_ranks_that_end_well(tmp_path, repository):
    end = start(tmp_path, repository, "well")
    assert end.failures == () and end.code == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["1", "1"]


def test_a_rank_that_did_its_work_is_not_killed_by_the_end_of_the_interpreter(tmp_path, repository):
    assert start(tmp_path, repository, "leave").failures == ()


def test_the_stacks_of_a_rank_that_dies_of_a_signal_are_shown(tmp_path, repository):
    (failure,) = start(tmp_path, repository, "abort").failures
    assert "rank 1 wrote:" in failure and "Fatal Python error: Aborted" in failure and "in body" in failure


def test_one_rank_that_fails_stops_all_with_its_message(tmp_path, repository):
    begin = time.monotonic()
    end = start(tmp_path, repository, "fail")
    assert end.code and end.failures == ("rank 1: the inputs are wrong\n  on this rank",)
    assert time.monotonic() - begin < 60


def test_an_unforeseen_exception_comes_with_its_traceback(tmp_path, repository):
    (failure,) = start(tmp_path, repository, "odd").failures
    assert failure.startswith("rank 1: KeyError: 'lost'") and "in body" in failure


def test_ranks_that_hang_are_stopped(tmp_path, repository):
    begin = time.monotonic()
    end = start(tmp_path, repository, "hang", timeout=15)
    assert end.code is None and "did not end in time" in end.failures[0]
    assert time.monotonic() - begin < 40
