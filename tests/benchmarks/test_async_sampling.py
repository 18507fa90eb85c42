"""The model of sampling ahead of the training, against runs worked out by hand and what holds of any run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.async_sampling import GROUP_SIZE, GROUPS, LENGTHS, StreamModel, draw, outcome

EQUAL = [[1.0] * GROUP_SIZE] * (GROUPS * 3)
ALL = GROUPS * GROUP_SIZE


def test_equal_rollouts_by_hand() -> None:
    # Three steps of 1 s, each followed by 2 s of the learner; one ahead, only the first sampling is waited for.
    assert outcome(0, EQUAL, ALL, 2.0).seconds == 9.0
    assert outcome(1, EQUAL, ALL, 2.0).seconds == 7.0
    assert outcome(2, EQUAL, ALL, 2.0).seconds == 7.0
    assert outcome(0, EQUAL, ALL // 2, 2.0).seconds == 12.0
    assert outcome(0, EQUAL, ALL, 2.0).busy == 3 / 9


def test_a_step_does_not_wait_for_a_long_group_that_another_can_stand_in_for() -> None:
    groups = [list(each) for each in EQUAL]
    groups[0][0] = 10.0
    # In turn the first step waits; in the stream only the last one does, which has no other group left.
    assert outcome(0, groups, ALL, 2.0).seconds == 18.0
    assert outcome(2, groups, ALL, 2.0).seconds == 12.0


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([*LENGTHS]),
    st.integers(0, 99),
    st.integers(2, 5),
    st.integers(GROUP_SIZE, 2 * ALL),
    st.sampled_from(["wait", "keep", "abort"]),
)
def test_every_group_is_trained_on_once_and_none_is_too_old(
    kind: str, seed: int, bound: int, places: int, update: str
) -> None:
    model = StreamModel(draw(kind, seed, steps=6), bound, places, 1.0, update)
    found = model.run()
    assert sorted(model.taken) == [*range(6 * GROUPS)]
    assert found.oldest <= bound and 0 < found.busy <= 1 + 1e-9


@pytest.mark.parametrize("kind", [*LENGTHS][1:])
def test_long_rollouts_make_the_stream_worth_it(kind: str) -> None:
    seconds = [outcome(bound, draw(kind, 0), ALL, 4.0).seconds for bound in (0, 2, 4)]
    assert seconds[0] > 1.5 * seconds[1] > 1.5 * seconds[2]


@pytest.mark.parametrize("bound", [2, 4])
def test_weights_that_change_under_rollouts_keep_the_places_full(bound: int) -> None:
    groups = draw("1 s, one in twenty 20 s", 0)
    wait, keep = (outcome(bound, groups, ALL // 2, 1.0, update) for update in ("wait", "keep"))
    assert keep.busy > 2 * wait.busy and keep.seconds < wait.seconds / 2
