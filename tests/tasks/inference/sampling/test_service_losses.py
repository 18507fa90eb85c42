"""Many rollouts notice the loss of a service at once; whoever sampled them is told of it once."""

import asyncio

import pytest

from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.inference.sampling.rollouts import _root_cause

pytestmark = pytest.mark.engine

LOST = ServiceLost("the engine", "http://127.0.0.1:9", "refused")


async def notice(error: Exception) -> None:
    raise error


async def group(*errors: Exception) -> None:
    async with asyncio.TaskGroup() as running:
        for error in errors:
            running.create_task(notice(error))


async def step(*groups: tuple[Exception, ...]) -> None:
    async with asyncio.TaskGroup() as running:
        for errors in groups:
            running.create_task(group(*errors))


@pytest.mark.parametrize("groups", [((LOST,),), ((ValueError("a bug"), LOST), (LOST,)), ((KeyError("x"),), (LOST,))])
def test_the_loss_of_a_service_comes_before_what_followed_from_it(groups: tuple[tuple[Exception, ...], ...]) -> None:
    with pytest.raises(ExceptionGroup) as several:
        asyncio.run(step(*groups))
    assert _root_cause(several.value) is LOST


def test_any_other_error_is_the_cause_itself() -> None:
    error = ValueError("a bug")
    with pytest.raises(ExceptionGroup) as several:
        asyncio.run(step((error,)))
    assert _root_cause(several.value) is error
