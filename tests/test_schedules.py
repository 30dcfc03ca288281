"""Every schedule, for all numbers of ranks, stages and microbatches: legal, without deadlock, as full as predicted."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fxpar.plans.errors import FxparError
from fxpar.plans.schedule import (
    Schedule,
    actions_of,
    in_flight,
    in_flight_on_rank,
    parse_action,
    rank_of_stage,
    schedule_problems,
)
from fxpar.schedules import SCHEDULES, make_schedule, stages_per_rank

ranks = st.integers(1, 8)
microbatches = st.integers(1, 24)
per_rank = st.integers(1, 4)


def made(name, ranks, microbatches, per_rank=None):
    """The schedule, where torch has one for these numbers."""
    try:
        return make_schedule(name, ranks, microbatches, per_rank)
    except FxparError as error:
        assert "there is no schedule" in str(error)  # never one that does not hold
        assume(False)


@pytest.mark.parametrize("name", SCHEDULES)
@given(ranks, microbatches, per_rank)
def test_every_schedule_holds(name, ranks, microbatches, per_rank):
    """Forward before backward, each action once, sends meet receives under blocking order."""
    one = made(name, ranks, microbatches, per_rank if SCHEDULES[name].stages_per_rank is None else None)
    assert list(schedule_problems(one)) == []
    assert len(one.ranks) == ranks and one.stages % ranks == 0
    assert sorted(rank_of_stage(one)) == sorted(list(range(ranks)) * (one.stages // ranks))
    for row, texts in zip(actions_of(one), one.ranks, strict=True):
        assert tuple(map(str, row)) == texts
    has_parts = any(a.kind == "W" for row in actions_of(one) for a in row)
    assert has_parts <= SCHEDULES[name].splits_backward
    assert not any(a.parts for row in actions_of(one) for a in row)  # each sends as soon as it has run


@given(ranks, microbatches)
def test_1f1b_and_gpipe_exist_for_all_numbers(ranks, microbatches):
    gpipe, ours = (make_schedule(name, ranks, microbatches) for name in ("gpipe", "1f1b"))
    assert in_flight(gpipe) == (microbatches,) * ranks
    assert in_flight(ours) == tuple(min(microbatches, ranks - stage) for stage in range(ranks))


@given(ranks, microbatches, per_rank)
def test_in_flight_of_interleaved_schedules(ranks, microbatches, per_rank):
    rounds = max(1, microbatches // ranks)
    a_round, all_of_them = microbatches // rounds, microbatches * per_rank
    warm = (per_rank - 1) * a_round
    one = made("interleaved", ranks, microbatches, per_rank)
    assert in_flight_on_rank(one) == tuple(min(all_of_them, warm + 2 * (ranks - 1 - r) + 1) for r in range(ranks))
    zero = made("zero-bubble", ranks, microbatches, per_rank)
    assert max(in_flight_on_rank(zero)) <= min(all_of_them, warm + ranks)


@given(ranks, microbatches)
def test_in_flight_of_v_schedules(ranks, microbatches):
    """A V holds as many on its way down as up: 2 per rank and rank, DualPipeV one more."""
    for name, most in (("zbv", 2 * ranks), ("dualpipev", 2 * ranks + 1)):
        one = made(name, ranks, microbatches)
        assert all(n <= min(microbatches, one.stages - s) for s, n in enumerate(in_flight(one)))
        assert max(in_flight_on_rank(one)) <= min(2 * microbatches, most)
        assert rank_of_stage(one) == (*range(ranks), *range(ranks - 1, -1, -1))


def small():
    return make_schedule("1f1b", 2, 2)


def changed(one, rank, change):
    rows = [list(row) for row in one.ranks]
    rows[rank] = change(rows[rank])
    return Schedule(one.name, one.stages, one.microbatches, tuple(map(tuple, rows)))


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(4, 8), st.data())
def test_a_schedule_with_a_hole_is_refused(name, ranks, microbatches, data):
    """Any action left out, unless nothing needs it."""
    one = made(name, ranks, microbatches)
    rank = data.draw(st.integers(0, ranks - 1))
    place = data.draw(st.integers(0, len(one.ranks[rank]) - 1))
    harmless = one.ranks[rank][place].endswith("RESHARD")
    holed = changed(one, rank, lambda row: row[:place] + row[place + 1 :])
    assert bool(list(schedule_problems(holed))) or harmless


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(4, 8), st.data())
def test_order_between_two_ranks_counts(name, ranks, microbatches, data):
    """A receive moved in front of an action that exchanges with the same rank deadlocks under blocking order."""
    one = made(name, ranks, microbatches)
    rank = data.draw(st.integers(0, ranks - 1))
    row = actions_of(one)[rank]
    where = rank_of_stage(one)

    def peer(a):
        if a.kind in ("SEND_F", "RECV_B"):
            return where[a.stage + 1]
        return where[a.stage - 1] if a.kind in ("SEND_B", "RECV_F") else None

    exchanges = [i for i, a in enumerate(row) if peer(a) is not None]
    pairs = [(i, j) for i, j in zip(exchanges, exchanges[1:], strict=False) if peer(row[i]) == peer(row[j])]
    assume(pairs)
    i, j = data.draw(st.sampled_from(pairs))

    def swap(texts):
        texts[i], texts[j] = texts[j], texts[i]
        return texts

    assert list(schedule_problems(changed(one, rank, swap)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: [*row, "0F0"], "0F0 is there twice"),
        (lambda row: [*row, "0F7"], "0F7 is of a stage or microbatch"),
        (lambda row: [*row, "1F0"], "stage 1 is on ranks [0, 1]"),
        (lambda row: [t for t in row if t != "0B1"], "runs F of microbatch 1"),
        (lambda row: ["0B0", *[t for t in row if t != "0B0"]], "0B0 comes before what it needs"),
        (lambda row: ["__import__('os')"], "is not an action"),
        (lambda row: [t for t in row if t != "0UNSHARD"], "comes before what it needs"),
        (lambda row: [t for t in row if t != "0REDUCE_GRAD"], "stage 0 never reduces its gradients"),
        (lambda row: [t for t in row if t != "0SEND_F0"], "for ever"),
    ],
)
def test_what_is_wrong_is_said(change, says):
    assert any(says in problem for problem in schedule_problems(changed(small(), 0, change)))


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0REDUCE_GRAD0", "(0F0)OVERLAP_F_B", "12345F0",
                                  "(0F0;0UNSHARD)OVERLAP_F_B", "0F0 ", "(0F0;1B0)F"])
def test_texts_that_are_no_actions(text):
    with pytest.raises(ValueError):
        parse_action(text)


def test_refusals_name_the_way_out():
    for name, numbers in (("nothing", (2, 2)), ("dualpipev", (4, 2)), ("interleaved", (4, 9)), ("1f1b", (2, 2, 3))):
        with pytest.raises(FxparError) as error:
            make_schedule(name, *numbers)
        assert error.value.way_out
    assert stages_per_rank("interleaved") == 2 and stages_per_rank("interleaved", 3) == 3
