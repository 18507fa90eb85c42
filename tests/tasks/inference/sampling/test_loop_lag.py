"""How late an event loop is, with a clock of our own."""

import asyncio
from contextlib import suppress

from tasks.inference.sampling.rollouts import LAG_INTERVAL_SECONDS, LoopLag


def test_what_a_sleep_takes_beyond_what_was_asked_is_lag() -> None:
    now, late = [100.0], iter([0.0, 0.5, 0.25])

    async def sleep(seconds: float) -> None:
        try:
            now[0] += seconds + next(late)
        except StopIteration:
            raise asyncio.CancelledError from None

    lag = LoopLag(lambda: now[0], sleep)
    with suppress(asyncio.CancelledError):
        asyncio.run(lag.run())
    assert (lag.num_samples, lag.worst, lag.total) == (3, 0.5, 0.75)
    assert str(lag) == "the event loop was 0.250 s late on average and 0.500 s at worst"


def test_early_is_not_late_and_nothing_is_not_zero() -> None:
    lag = LoopLag()
    assert str(lag) == "the event loop's lag was not measured"
    lag.add(-0.01)
    assert (lag.num_samples, lag.worst) == (1, 0.0)


def test_a_loop_that_is_held_up_is_late() -> None:
    async def scene() -> LoopLag:
        lag, loop = LoopLag(), asyncio.get_running_loop()
        looking = asyncio.create_task(lag.run())
        await asyncio.sleep(0)
        began = loop.time()
        while loop.time() < began + 2 * LAG_INTERVAL_SECONDS:
            pass  # nobody else gets a turn
        while not lag.num_samples:
            await asyncio.sleep(0)
        looking.cancel()
        return lag

    assert asyncio.run(scene()).worst >= LAG_INTERVAL_SECONDS
