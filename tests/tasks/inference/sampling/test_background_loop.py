"""A coroutine beside the thread that waits for it: results, errors, signals, lag, and what many losses come to."""

import asyncio
import os
import signal
import threading
from contextvars import ContextVar

import pytest

from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.inference.sampling.sampler import _root_cause, run_in_background_loop
from tests.fixtures.waiting import until_told

NAME = ContextVar("name", default="nobody")
LOST = ServiceLost("http://127.0.0.1:9", "refused")


class Told(BaseException):
    """What a handler raises, as Prefect's does: no error that anybody expects."""


@pytest.fixture
def raising():
    """Within the test SIGTERM raises."""

    def handler(*_):
        raise Told

    before = signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_gives_what_the_coroutine_gives_and_knows_the_caller_s_context():
    async def work():
        await asyncio.sleep(0)
        return NAME.get(), threading.current_thread().name

    NAME.set("Ada")
    name, thread = run_in_background_loop(work())
    assert name == "Ada" and thread.startswith("event loop")


@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("where", ["callback", "task"])
def test_a_signal_in_the_middle_of_a_loop_cancels_the_work_and_is_passed_on(where):
    ended = []

    async def tell():
        os.kill(os.getpid(), signal.SIGTERM)

    async def work():
        if where == "task":
            told = asyncio.create_task(tell())
        else:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # there is time to end in order
            ended.append("in order" if where == "callback" or told.done() else "early")
            raise

    with pytest.raises(Told):
        run_in_background_loop(work())
    assert ended == ["in order"]


@pytest.mark.usefixtures("raising")
def test_a_signal_that_comes_when_the_work_is_done_is_passed_on():
    async def work():
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Told):
        run_in_background_loop(work())
        until_told()  # where the work was quicker than the signal


BUG = ValueError("a bug")


@pytest.mark.parametrize(
    ("groups", "cause"),
    [(((LOST,),), LOST), (((BUG, LOST), (LOST,)), LOST), (((BUG,), (LOST,)), LOST), (((BUG,),), BUG)],
)
def test_the_loss_of_a_service_comes_before_what_followed_from_it(groups, cause):
    step = ExceptionGroup("groups", [ExceptionGroup("rollouts", errors) for errors in groups])
    assert _root_cause(step) is cause
