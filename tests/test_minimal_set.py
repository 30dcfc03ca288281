"""The deletion filter, against trying every part of small sets."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from fxpar.minimal_set import minimal_set

CONFLICTS = st.lists(st.frozensets(st.integers(0, 6), min_size=1), min_size=1, max_size=5)


@given(CONFLICTS)
def test_a_conflict_is_found_of_which_no_member_can_be_spared(conflicts):
    """What is impossible: everything that contains one of the drawn sets."""

    def possible(part):
        return not any(conflict <= set(part) for conflict in conflicts)

    found = minimal_set(range(7), possible)
    assert not possible(found)
    assert all(possible(part) for part in combinations(found, len(found) - 1))
    assert list(found) == sorted(found)


@given(st.sets(st.frozensets(st.integers(0, 4))))
def test_no_member_can_be_spared_though_leaving_one_out_may_make_things_worse(allowed):
    """Any family of possible sets; all together are impossible."""
    allowed = {part for part in allowed if len(part) < 5}
    found = minimal_set(range(5), lambda part: frozenset(part) in allowed)
    assert frozenset(found) not in allowed
    assert all(frozenset(found) - {member} in allowed for member in found)
