"""WeightTransfer takes back what it has begun, by the calls that vLLM's workers then answer."""

import pytest

from tasks.inference.engine.client import EngineError
from tasks.inference.engine.transfer import State, TransferFailed, WeightTransfer

BEGUN = ["start_weight_update", "update_weights"]


class StubEngine:
    """Notes the routes that are called, and refuses one."""

    url = "http://engine"

    def __init__(self, refused=""):
        self.refused, self.called = refused, []

    def call(self, route, content):
        self.called.append(route)
        if route == self.refused:
            raise EngineError(f"{route} answered 500")


def send(url, call):
    """Send as a learner does that is lost before the last call."""
    for route in BEGUN:
        call(route, {})
    raise TransferFailed("the learner went away")


def test_an_update_that_goes_on_is_finished():
    engine = StubEngine()
    transfer = WeightTransfer(engine, send, workers=2)
    assert not transfer.receive() and transfer.state is State.IDLE
    assert engine.called == [*BEGUN, "finish_weight_update"]


def test_one_that_the_engine_has_ended_is_begun_again_first():
    engine = StubEngine(refused="update_weights")
    assert not WeightTransfer(engine, send, workers=1).receive()
    assert engine.called == [*BEGUN, "start_weight_update", "finish_weight_update"]


def test_workers_that_failed_are_asked_for_nothing_more():
    engine = StubEngine(refused="update_weights")
    with pytest.raises(EngineError, match="the 2 workers of the engine at http://engine failed to take a policy"):
        WeightTransfer(engine, send, workers=2).receive()
    assert engine.called == BEGUN
