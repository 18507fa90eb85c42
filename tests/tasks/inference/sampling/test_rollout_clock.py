"""The clock of rollouts' time limits counts no time in which nothing could get further."""

import asyncio
import time as blocking_time

import pytest

from tasks.inference.sampling import rollout_clock
from tasks.inference.sampling.rollout_clock import LONGEST_TICK_SECONDS, RolloutClock
from tests.fixtures.faults import happened
from tests.fixtures.waiting import in_loop

A, B = "http://a", "http://b"


class Time:
    """Seconds that a test lets pass."""

    seconds = 1000.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def time():
    return Time()


def passed(clock, time, seconds):
    """Let seconds pass with a tick after each; return what the clock counts."""
    for _ in range(seconds):
        time.seconds += 1
        clock.tick()
    return clock.now()


@pytest.mark.fault("clock", "the event loop stands still for an hour", "the hour does not count")
def test_a_loop_that_stood_still_is_not_counted(time):
    clock = RolloutClock(time)
    assert passed(clock, time, 10) == 10
    time.seconds += 3600
    happened("an hour without a tick")
    assert clock.now() == 10 + LONGEST_TICK_SECONDS, "whoever asks first, the tick or a time limit"
    clock.tick()
    assert passed(clock, time, 10) == 20 + LONGEST_TICK_SECONDS


@in_loop
async def test_the_worst_lag_of_the_event_loop_is_measured(monkeypatch):
    monkeypatch.setattr(rollout_clock, "TICK_SECONDS", 0.001)
    clock = RolloutClock()
    counting = asyncio.create_task(clock.run())
    await asyncio.sleep(0.01)
    blocking_time.sleep(0.05)
    await asyncio.sleep(0.01)
    counting.cancel()
    assert 0.04 < clock.worst_lag < 30


def test_it_stands_still_while_any_engine_is_silent_from_the_first_unanswered_question_on(time):
    clock = RolloutClock(time)
    passed(clock, time, 30)
    assert clock.note_silence(A, 15.0) == 15
    assert passed(clock, time, 40) == 15, "the fifteen seconds of the question are given back"
    assert clock.note_silence(B, 15.0) == 15
    assert clock.note_silence(A, 15.0) == 55
    assert clock.num_silences == 2 and clock.is_silent(A) and clock.is_silent(B)
    clock.note_answer(A)
    assert passed(clock, time, 10) == 15, "the other one is silent still"
    clock.note_answer(B)
    assert not clock.is_silent(B)
    assert passed(clock, time, 5) == 20
