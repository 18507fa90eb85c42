"""Model calls in batches, against a web server that keeps to the engine's contract, and one without the route."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from tasks.inference.environments import batched_calls
from tasks.inference.environments.batched_calls import BATCH, SESSION, SINGLE, BatchingClient
from tests.fixtures.pictures import picture_url

pytestmark = pytest.mark.engine

KEY = {"Authorization": "Bearer key"}


class Engine:
    """Answers a call with its own first token; what it is told by the tokens is in `line`."""

    def __init__(self, has_batches: bool = True) -> None:
        self.has_batches = has_batches
        self.url = ""
        self.sizes: list[int] = []
        self.singles: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.aborted: list[str] = []
        self.closed = asyncio.Event()
        self.hold = asyncio.Event()

    async def many(self, request: web.Request) -> web.StreamResponse:
        """Answer in reverse; a call of token 13 is refused, of 99 waits, and at 66 the connection is lost."""
        if not self.has_batches:
            raise web.HTTPNotFound
        calls = (await request.json())["requests"]
        self.headers.append(request.headers["Authorization"])
        self.sizes.append(len(calls))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        try:
            for index, call in sorted(enumerate(calls), reverse=True):
                (token,) = call["token_ids"]
                if token == 66:
                    request.transport.abort()  # type: ignore[union-attr]
                    return response
                if token == 99:
                    await self.hold.wait()
                refused = token == 13
                body = {"error": {"message": "no"}} if refused else {"token": token, "id": call["request_id"]}
                line = json.dumps([index, 400 if refused else 200, body]).encode()
                await response.write(line[:7])
                await response.write(line[7:] + b"\n")
        except (asyncio.CancelledError, ConnectionError):
            self.closed.set()
            raise
        return response

    async def single(self, request: web.Request) -> web.Response:
        """Answer one call."""
        body = await request.json()
        self.singles.append(body)
        return web.json_response({"token": body["token_ids"][0]})

    async def abort(self, request: web.Request) -> web.Response:
        """Note what is aborted."""
        self.aborted += (await request.json())["request_ids"]
        return web.json_response({})


@asynccontextmanager
async def asking(engine: Engine, read: float | None = None) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Yield what asks an engine one call and returns its answer."""
    from verifiers.v1.clients.base import build_async_openai
    from verifiers.v1.configs.client import TrainClientConfig

    app = web.Application()
    app.router.add_post(BATCH, engine.many)
    app.router.add_post(SINGLE, engine.single)
    app.router.add_post(batched_calls.ABORT, engine.abort)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = TrainClientConfig(base_url=f"{engine.url}/v1", headers=KEY, timeout={"read": read})
    # As the servers of verifiers' pool have them: one client for every 32 rollouts.
    clients = [BatchingClient(build_async_openai(config), config) for _ in range(4)]

    async def ask(token: int, session: str = "", **more: Any) -> Any:
        body = {"model": "policy", "token_ids": [token], **more}
        headers = {"headers": {SESSION: session}} if session else {}
        answer = await clients[token % 4].post(engine.url + SINGLE, cast_to=httpx.Response, body=body, options=headers)
        return json.loads(answer.content)

    try:
        yield ask
    finally:
        engine.hold.set()
        for client in clients:
            await client.close()
        await runner.cleanup()
        assert batched_calls._batches == {}, "a batch outlives its clients"


def test_calls_that_come_one_after_another_become_few_requests() -> None:
    engine = Engine()

    async def start(ask: Callable[..., Awaitable[Any]], number: int) -> Any:
        for _ in range(number % 16):  # what a rollout does before it asks
            await asyncio.sleep(0)
        return await ask(1000 + number)

    async def go() -> list[Any]:
        async with asking(engine) as ask:
            return await asyncio.gather(*(start(ask, number) for number in range(128)))

    answers = asyncio.run(go())
    assert [answer["token"] for answer in answers] == list(range(1000, 1128)), "each gets its own answer"
    assert len({answer["id"] for answer in answers}) == 128
    assert sum(engine.sizes) == 128 and len(engine.sizes) <= 16
    assert set(engine.headers) == {KEY["Authorization"]}


def test_a_refused_call_fails_as_before_and_alone() -> None:
    from openai import BadRequestError
    from verifiers.v1.errors import model_error

    async def go() -> list[Any]:
        async with asking(Engine()) as ask:
            return await asyncio.gather(ask(1), ask(13), ask(2), return_exceptions=True)

    first, refused, last = asyncio.run(go())
    assert (first["token"], last["token"]) == (1, 2)
    assert isinstance(refused, BadRequestError)
    assert str(refused) == "Error code: 400 - {'error': {'message': 'no'}}" and model_error(refused).status_code == 400


def test_a_lost_connection_fails_all_that_were_not_answered() -> None:
    from openai import APIConnectionError
    from verifiers.v1.errors import model_error

    async def go() -> list[Any]:
        async with asking(Engine()) as ask:
            return await asyncio.gather(ask(1), ask(66), ask(3), return_exceptions=True)

    first, second, answered = asyncio.run(go())
    assert answered["token"] == 3
    assert isinstance(first, APIConnectionError) and isinstance(second, APIConnectionError) and first is not second
    assert model_error(first).status_code == 503 and first.__cause__ is not None


def test_an_engine_that_is_gone_is_a_connection_error() -> None:
    from openai import APIConnectionError

    async def go() -> None:
        async with asking(Engine()) as ask:
            await ask(1)
            (batches,) = batched_calls._batches.values()
            batches.root = "http://127.0.0.1:9"
            with pytest.raises(APIConnectionError):
                await ask(1)

    asyncio.run(go())


def test_a_silent_engine_is_a_timeout() -> None:
    from openai import APITimeoutError

    async def go() -> list[Any]:
        async with asking(Engine(), read=0.5) as ask:
            return await asyncio.gather(ask(99), return_exceptions=True)

    (late,) = asyncio.run(go())
    assert isinstance(late, APITimeoutError)


def test_a_cancelled_call_is_aborted_and_the_others_go_on() -> None:
    engine = Engine()

    async def go() -> Any:
        async with asking(engine) as ask:
            kept, cancelled = asyncio.create_task(ask(1)), asyncio.create_task(ask(99))
            while not engine.sizes:
                await asyncio.sleep(0.01)
            cancelled.cancel()
            while not engine.aborted:
                await asyncio.sleep(0.01)
            assert not kept.done() and not engine.closed.is_set()
            engine.hold.set()
            return await kept

    assert asyncio.run(go())["token"] == 1
    assert len(engine.aborted) == 1


def test_a_batch_that_nobody_waits_for_is_closed() -> None:
    engine = Engine()

    async def go() -> None:
        async with asking(engine) as ask:
            calls = [asyncio.create_task(ask(99)) for _ in range(3)]
            while not engine.sizes:
                await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()
            await asyncio.wait_for(engine.closed.wait(), 20)

    asyncio.run(go())


def test_a_call_that_is_cancelled_before_it_is_sent_is_never_sent() -> None:
    engine = Engine()

    async def go() -> Any:
        async with asking(engine) as ask:
            kept, cancelled = asyncio.create_task(ask(1)), asyncio.create_task(ask(2))
            await asyncio.sleep(0)
            cancelled.cancel()
            return await kept

    assert asyncio.run(go())["token"] == 1
    assert engine.sizes == [1] and engine.aborted == []


def test_an_engine_without_the_route_is_asked_call_by_call() -> None:
    engine = Engine(has_batches=False)

    async def go() -> list[Any]:
        async with asking(engine) as ask:
            return [*await asyncio.gather(*(ask(token) for token in range(8))), await ask(8)]

    assert [answer["token"] for answer in asyncio.run(go())] == list(range(9))
    assert all("request_id" not in body for body in engine.singles) and len(engine.singles) == 9


def test_calls_with_images_go_one_by_one() -> None:
    engine = Engine()

    async def go() -> list[Any]:
        async with asking(engine) as ask:
            return await asyncio.gather(ask(1, content_parts=[{"type": "image_url", "url": picture_url()}]), ask(2))

    asyncio.run(go())
    assert engine.sizes == [1] and [body["token_ids"] for body in engine.singles] == [[1]]


class Trace:
    """As much of a trace as a rollout's turns are told by."""

    id = "trace"


@pytest.mark.parametrize("has_batches", [True, False])
def test_turns_are_sent_as_they_end_and_what_is_known_is_not_asked_again(has_batches: bool) -> None:
    from tasks.inference.environments.kept_turns import kept_rollout, turns_of

    engine, sent = Engine(has_batches), list[Any]()

    async def play(ask: Callable[..., Awaitable[Any]], known: dict[str, str] | None) -> list[int]:
        with kept_rollout(known, sent.append) as claim:
            if claim:
                claim(Trace())
            answers = [await ask(token, Trace.id, cache_salt=str(len(sent))) for token in (1, 2)]
        assert turns_of(Trace.id) is None, "a rollout that has ended is still known"
        return [answer["token"] for answer in answers]

    async def go() -> list[list[int]]:
        async with asking(engine) as ask:
            first = await play(ask, {})
            known = {turn["request"]: turn["answer"] for turn in sent[:1]}
            return [first, await play(ask, known), await play(ask, None), [(await ask(1, "another"))["token"]]]

    assert asyncio.run(go()) == [[1, 2], [1, 2], [1, 2], [1]]
    assert [json.loads(turn["answer"])["token"] for turn in sent] == [1, 2, 2]
    assert {turn["model"] for turn in sent} == {"policy"} and sent[1]["request"] == sent[2]["request"]
    asked = len(engine.singles) if not has_batches else sum(engine.sizes)
    assert asked == 2 + 1 + 2 + 1


def test_an_answer_that_the_end_of_an_engine_cut_off_is_not_kept() -> None:
    from tasks.inference.environments.kept_turns import KeptRollout

    sent = list[Any]()
    rollout = KeptRollout({}, sent.append)
    rollout.keep("a", "policy", b'{"choices":[{"finish_reason":"abort"}]}')
    rollout.keep("b", "policy", b'{"choices":[{"finish_reason":"stop"}]}')
    assert [turn["request"] for turn in sent] == ["b"]
