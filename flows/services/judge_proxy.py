"""JudgeProxy: an address of this machine at which the code of environments asks judges of the run.

A judge of an environment whose `base_url` is `judge://NAME` is sent here. It is answered by the run's judge of that
name, through the answers of the store, as the stage `judging` is. The server is a thread of the run's process; its
callers are servers of environments and graders. The address has a secret: others on this machine could spend money.
"""

import asyncio
import secrets
import threading
from collections import defaultdict
from concurrent.futures import Future
from contextlib import AsyncExitStack

from aiohttp import web

from configs.environments import EnvironmentConfig
from configs.judges import JudgeConfig, judges_inside, with_judges_at
from configs.run import RunConfig
from flows.services.process import ServiceFailed
from storage.judge_answers import AnswerTable, JudgeAnswers
from tasks.judging.client import JudgeAddress, JudgeBudgetSpent, JudgeClient, JudgeFailed
from tasks.runtime.services import TeacherService

NO_STEP = -1
"""The step of answers to questions of environments, which do not say it."""
MAX_REQUEST_BYTES = 64 * 2**20
FAILED = 424
"""The status of a question without an answer: one that clients do not send again, as it was sent again here."""


class JudgeProxy:
    """Answers questions of environments from the store, or by the judges of a run."""

    def __init__(self, config: RunConfig, answers: AnswerTable, teachers: TeacherService) -> None:
        self._judges = {judge.name: judge for judge in config.judges}
        self._run, self._table, self._teachers = config.name, answers, teachers
        self._secret = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = Future()
        self._clients: dict[str, JudgeClient] = {}
        self._opening = defaultdict[str, asyncio.Lock](asyncio.Lock)

    def route(self, environment: EnvironmentConfig) -> EnvironmentConfig:
        """Return an environment with the address of this server for each judge of the run that it names."""
        names = judges_inside(environment)
        return with_judges_at(environment, {name: f"{self._url()}/{name}/v1" for name in names})

    def close(self) -> None:
        """End the server once its answers are in the store; nothing where none was needed."""
        if self._thread and self._thread.is_alive():
            loop, closing, _ = self._started.result()
            loop.call_soon_threadsafe(closing.set)
            self._thread.join()

    def _url(self) -> str:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="judges", daemon=True)
                self._thread.start()
        return f"http://127.0.0.1:{self._started.result()[2]}/{self._secret}"

    async def _serve(self) -> None:
        closing = asyncio.Event()
        application = web.Application(client_max_size=MAX_REQUEST_BYTES)
        application.router.add_post(f"/{self._secret}/{{name}}/v1/chat/completions", self._answer)
        runner = web.AppRunner(application)
        with JudgeAnswers(self._table) as self._answers:
            async with AsyncExitStack() as self._open:
                try:
                    await runner.setup()
                    self._open.push_async_callback(runner.cleanup)
                    await web.TCPSite(runner, "127.0.0.1", 0).start()
                except BaseException as error:
                    self._started.set_exception(error)
                    raise
                self._started.set_result((asyncio.get_running_loop(), closing, runner.addresses[0][1]))
                await closing.wait()

    async def _answer(self, request: web.Request) -> web.Response:
        judge = self._judges[request.match_info["name"]]
        body = {name: value for name, value in (await request.json()).items() if name not in ("model", "stream")}
        try:
            answer = await (await self._client(judge)).ask({**judge.sampling, **body})
        except (JudgeFailed, JudgeBudgetSpent, ServiceFailed) as error:
            if judge.path:  # its engine may come back at another address
                self._clients.pop(judge.name, None)
            return web.json_response({"error": {"message": f"judge {judge.name!r}: {error}"}}, status=FAILED)
        return web.Response(text=answer.response, content_type="application/json")

    async def _client(self, judge: JudgeConfig) -> JudgeClient:
        async with self._opening[judge.name]:
            if judge.name not in self._clients:
                served = await asyncio.to_thread(self._teachers.serve, judge)  # waits for an engine
                client = JudgeClient(judge, JudgeAddress.of(served), self._answers, self._run, NO_STEP)
                self._clients[judge.name] = await self._open.enter_async_context(client)
            return self._clients[judge.name]
