"""Work beside this process gives what work here gives."""

import os
import signal

import pytest

from fxpar.beside import beside
from fxpar.plans.errors import Infeasible


@pytest.mark.parametrize("worthwhile", [True, False])
def test_the_result_is_that_of_the_work(worthwhile):
    many = list(range(300_000))  # more than a pipe holds
    assert beside(lambda: many, worthwhile=worthwhile)() == many


def test_the_work_is_done_in_another_process():
    where = beside(os.getpid)()
    assert (where != os.getpid()) == (len(os.sched_getaffinity(0)) > 1)


@pytest.mark.parametrize("worthwhile", [True, False])
def test_errors_come_with_all_that_they_say(worthwhile):
    def fail():
        raise Infeasible("nothing fits", numbers="3 of 2 GiB", way_out="more memory")

    with pytest.raises(Infeasible, match="3 of 2 GiB"):
        beside(fail, worthwhile=worthwhile)()


def test_a_killed_process_costs_nothing_but_time():
    home = os.getpid()

    def work():
        if os.getpid() != home:
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    assert beside(work)() == "done"


def test_results_come_in_any_order():
    first, second = beside(lambda: 1), beside(lambda: 2)
    assert (second(), first()) == (2, 1)
