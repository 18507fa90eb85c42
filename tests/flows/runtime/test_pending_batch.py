"""A step's batch while it is built: whoever asks for it, and however often, is told how that went."""

from threading import Event

import pytest

from flows.orchestration.states import EmptyBatch
from flows.runtime.pipeline import PendingBatch
from flows.runtime.records import StepBatch


def test_a_batch_that_could_not_be_built_says_so_to_everybody():
    def build(engine_free: Event) -> StepBatch:
        raise EmptyBatch("nothing to train on")

    pending = PendingBatch(build, None)
    for ask in (pending.result, pending.result, pending.wait_for_engine):
        with pytest.raises(EmptyBatch):
            ask()
