"""A proxy in front of a real engine that keeps what goes through, and fails where it is told to."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, web

from tests.waiting import PATIENCE

GENERATE = "/inference/v1/generate"
EMPTY, MALFORMED, HELD = "empty", "malformed", "held"


@dataclass
class Call:
    """One model call."""

    session: str | None
    """What the header X-Session-ID said."""
    body: dict[str, Any]
    status: int
    answer: dict[str, Any] | None

    @property
    def seed(self) -> int:
        """The seed that the call was to be sampled with."""
        return int(self.body["sampling_params"]["seed"])

    @property
    def sent(self) -> list[int]:
        """The tokens that went in."""
        return list(self.body["token_ids"])

    @property
    def sampled(self) -> list[int]:
        """The tokens that came out."""
        assert self.answer is not None
        return list(self.answer["choices"][0]["token_ids"])


@dataclass
class Proxy:
    """What a proxy has seen, and what it does to calls with a certain seed, one after another."""

    url: str
    engine: str
    faults: Mapping[int, Sequence[int | str]] = field(default_factory=dict)
    """By seed: a status, EMPTY, MALFORMED or HELD (never answered) for the first calls; later ones go through."""
    calls: list[Call] = field(default_factory=list)
    together: int = 0
    """Calls wait until calls with so many different seeds have come."""
    came: set[int] = field(default_factory=set)
    """Seeds of calls that have come, answered or not."""
    held: set[int] = field(default_factory=set)
    """Seeds of calls that are being held."""
    after_held: set[int] = field(default_factory=set)
    """Seeds of calls that wait until one is being held."""
    hung_up: set[int] = field(default_factory=set)
    """Seeds of calls that were held until whoever asked had hung up."""

    def of_seed(self, *seeds: int) -> list[Call]:
        """The calls with one of some seeds, in order."""
        return [call for call in self.calls if call.seed in seeds]

    @property
    def seeds(self) -> Counter[int]:
        """How many calls there were with which seed."""
        return Counter(call.seed for call in self.calls)

    async def answer(self, request: web.Request) -> web.Response:
        """Pass a request on, or fail it."""
        data = await request.read()
        if not request.path.endswith(GENERATE):
            return await self._through(request, data)
        body, session = json.loads(data), request.headers.get("X-Session-ID")
        self.came.add(body["sampling_params"]["seed"])
        while len(self.came) < self.together:
            await asyncio.sleep(0.02)
        while body["sampling_params"]["seed"] in self.after_held and not self.held:
            await asyncio.sleep(0.02)
        fault = self._fault(body["sampling_params"]["seed"])
        if isinstance(fault, int):
            self.calls.append(Call(session, body, fault, None))
            return web.json_response({"error": {"message": "planted", "type": "planted", "code": fault}}, status=fault)
        if fault == HELD:
            await self._hold(body["sampling_params"]["seed"])
        answered = await self._through(request, data)
        answer = json.loads(answered.body or b"null")
        if fault == EMPTY:
            answer["choices"][0] |= {"token_ids": [], "logprobs": {"content": []}}
        if fault == MALFORMED:
            answer = {"choices": []}
        self.calls.append(Call(session, body, answered.status, answer))
        return web.json_response(answer, status=answered.status)

    async def _hold(self, seed: int) -> None:
        self.held.add(seed)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.hung_up.add(seed)
            raise

    def _fault(self, seed: int) -> int | str | None:
        planned = self.faults.get(seed, ())
        number = self.seeds[seed]
        return planned[number] if number < len(planned) else None

    async def _through(self, request: web.Request, data: bytes) -> web.Response:
        kept = {
            name: value for name, value in request.headers.items() if name.lower() not in ("host", "content-length")
        }
        async with (
            ClientSession() as session,
            session.request(request.method, self.engine + request.path_qs, data=data, headers=kept) as answered,
        ):
            body = await answered.read()
            return web.Response(body=body, status=answered.status, content_type=answered.content_type)


@contextmanager
def recording(engine: str) -> Iterator[Proxy]:
    """A proxy in front of `engine` until the block ends, on a port that the system chose."""
    proxy, loop, ready = Proxy("", engine.rstrip("/")), asyncio.new_event_loop(), threading.Event()

    async def serve() -> web.AppRunner:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{rest:.*}", proxy.answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        proxy.url = f"http://{host}:{port}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(serve())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()
