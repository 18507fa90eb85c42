"""How many rollouts were under way and how long the learner waited, by a clock that the test moves."""

from asyncio import CancelledError
from types import SimpleNamespace

import pytest

from tasks.inference.sampling.load_meter import LoadMeter


class Clock:
    """Tells the seconds that the test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def test_rollouts_idle_time_and_waits_are_added_up_between_two_readings():
    clock = Clock()
    meter = LoadMeter(clock)
    clock.now += 2  # nothing is under way
    with meter.rollout():
        clock.now += 3
        with meter.rollout(), meter.learner_waits():
            clock.now += 5
    load = SimpleNamespace(**meter.read())
    assert (load.seconds, load.idle_seconds, load.learner_waited_seconds) == (10, 2, 5)
    assert load.in_flight == pytest.approx((3 * 1 + 5 * 2) / 10)
    clock.now += 4
    after = SimpleNamespace(**meter.read())
    assert (after.seconds, after.idle_seconds, after.learner_waited_seconds, after.in_flight) == (4, 4, 0, 0)


def test_what_lasts_from_one_reading_to_the_next_counts_in_both():
    clock = Clock()
    meter = LoadMeter(clock)
    with meter.rollout(), meter.learner_waits():
        clock.now += 1
        first = SimpleNamespace(**meter.read())
        clock.now += 2
    second = SimpleNamespace(**meter.read())
    loads = [(each.seconds, each.in_flight, each.learner_waited_seconds) for each in (first, second)]
    assert loads == [(1, 1, 1), (2, 1, 2)]
    assert meter.read()["in_flight"] == 0, "no time has gone by: as many as there are"


def test_rollouts_that_end_and_those_that_are_stopped_are_told_apart():
    meter = LoadMeter()
    with meter.rollout():
        pass
    for _ in range(2):
        with pytest.raises(CancelledError), meter.rollout():
            raise CancelledError
    load = SimpleNamespace(**meter.read())
    assert (load.num_ended, load.num_cancelled) == (1, 2)
    assert meter.read()["num_cancelled"] == 0
