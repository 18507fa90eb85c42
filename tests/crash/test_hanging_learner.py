"""A learner that stands still in the middle of a step, alive: it is ended, another takes over, and nothing differs."""

from collections.abc import Callable

import pytest

from storage.store import open_store
from tests.crash.checks import check_clean, check_same
from tests.fixtures.driving import NAME, Driven, check_once, side_by_side, work

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

TRAINING = "after request train #2"
PATIENT = ("learner.hang_seconds=20", "learner.max_restarts=5")
"""Short for a test, and longer than a busy machine keeps this small learner from its next row."""


def test_a_stopped_learner_is_replaced_and_the_run_ends_as_if_nothing_had_happened(
    drive: Callable[..., Driven], uninterrupted: Driven
) -> None:
    run, tired = drive(*PATIENT), drive("learner.hang_seconds=20", "learner.max_restarts=0")
    life, last = side_by_side(lambda: run.live(stop=TRAINING), lambda: tired.live(stop=TRAINING))
    assert [receipt["moment"] for receipt in life.receipts] == [TRAINING]
    assert life.status == 0, life.output
    heading = "--- learner, generation 2: the one before did not answer any more and was ended\n"
    assert heading in (run.store / "logs" / NAME / "learner.log").read_text()
    assert "has not answered for 20 s (learner.hang_seconds)" in life.output
    check_same(run, uninterrupted)
    check_clean(run)
    assert last.status == 1
    assert "service 'learner' did not answer any more and was ended in generation 1: no restart of 0" in last.output
    assert "What is in the store is safe" in last.output
    check_once(tired.store)
    done = [(stage, step) for stage, step, _ in work(open_store(tired.store)) if stage in ("packing", "training")]
    assert sorted(done) == [("packing", 0), ("packing", 1), ("training", 0)], "all but the step that it stood still in"
