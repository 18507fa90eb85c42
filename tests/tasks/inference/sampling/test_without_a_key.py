"""An engine without a key is asked like any other: how busy it is, and whether what is behind its server lives."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from aiohttp import web

from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling.limits import EngineLoad, read_load
from tasks.inference.sampling.lost_servers import ServiceLost, ServiceWatch

PAGE = """vllm:num_requests_running 1
vllm:num_requests_waiting 2
vllm:kv_cache_usage_perc 0.5
vllm:num_preemptions_total 4
"""
Found = TypeVar("Found")


def asked(key: str, status: int, question: Callable[[ServedModel], Awaitable[Found]]) -> tuple[Found, list[str | None]]:
    """Ask a server that answers every path with one status; return what was found, and the keys that it was shown."""

    async def scene() -> tuple[Found, list[str | None]]:
        shown: list[str | None] = []

        async def answer(request: web.Request) -> web.Response:
            shown.append(request.headers.get("Authorization"))
            return web.Response(text=PAGE, status=status)

        app = web.Application()
        app.router.add_get("/{path}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await question(ServedModel(f"http://127.0.0.1:{runner.addresses[0][1]}", key)), shown
        finally:
            await runner.cleanup()

    return asyncio.run(scene())


async def lives(served: ServedModel) -> None:
    """Whether it lives, as those ask who sample with it."""
    await ServiceWatch((served,), {}).check()


@pytest.mark.parametrize(("key", "header"), [("", None), ("secret", "Bearer secret")])
def test_how_busy_it_is(key: str, header: str | None) -> None:
    assert asked(key, 200, read_load) == (EngineLoad(1, 2, 0.5, 4), [header])
    assert asked(key, 404, read_load) == (None, [header])


@pytest.mark.parametrize("key", ["", "secret"])
def test_a_server_that_falters_has_no_answer_yet(key: str) -> None:
    with pytest.raises(ConnectionError, match="it answers 503"):
        asked(key, 503, read_load)


@pytest.mark.parametrize("key", ["", "secret"])
def test_an_engine_that_died_behind_its_server_is_lost(key: str) -> None:
    assert asked(key, 200, lives)[0] is None
    with pytest.raises(ServiceLost, match="its server answers 503"):
        asked(key, 503, lives)
