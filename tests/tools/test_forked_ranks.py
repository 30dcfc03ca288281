"""Forked ranks: what is said of one that a signal kills, and of one that raises."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from tools.forked_ranks import forked_ranks


def met():
    """Joins the group, as any rank does."""
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_rank()


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_rank_that_a_signal_kills_says_which_and_where(name, tmp_path):
    def body():
        if met() == 1:
            os.kill(os.getpid(), getattr(signal, name))
        dist.barrier()

    end = forked_ranks(2, body, tmp_path, timeout=60)
    told = next(message for rank, message in end.messages if rank == 1)
    assert told.startswith(f"killed by {name}")
    assert "in body" in told
    assert end.code not in (0, None)


def test_ranks_that_end_well_say_nothing(tmp_path):
    end = forked_ranks(2, met, tmp_path, timeout=60)
    assert (end.code, end.messages, end.failures) == (0, (), ())


def test_a_rank_that_raises_says_what(tmp_path):
    def body():
        if met() == 0:
            raise ValueError("seven")

    end = forked_ranks(2, body, tmp_path, timeout=60)
    assert any("ValueError: seven" in failure for failure in end.failures)
