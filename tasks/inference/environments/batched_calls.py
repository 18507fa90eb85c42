"""Sends the model calls that rollouts of this process make at about the same time to the engine in one request.

verifiers' client asks the engine once for each turn. A request costs client and engine several times what the tokens of
a small model cost, and calls that come one by one are computed one by one.

Where the client's headers ask for it, each answer says which policies sampled its tokens. That is noted in the trace's
info, under the number of the reply's node.
"""

import asyncio
import functools
import re
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.inference.engine.client import POLICIES_HEADER, sampled_by
from tasks.inference.environments.kept_turns import digest, turns_of
from tasks.inference.trace_rows.image_tensors import picture_problem
from tasks.inference.trace_rows.rows import POLICIES_FIELD

if TYPE_CHECKING:
    import httpx
    from openai import APIConnectionError, AsyncOpenAI
    from verifiers.v1.configs.client import BaseClientConfig

QUIET_SECONDS = 0.005
"""A batch is sent once no call has joined it for so long, and the event loop has nothing else to do."""
LONGEST_SECONDS = 0.2
"""A batch is sent after so long at the latest."""
FULL = 32
"""Calls with which a batch is sent at once: the engine then computes while the next ones are prepared."""
SINGLE = "/inference/v1/generate"
BATCH = "/inference/v1/generate_many"
ABORT = "/inference/v1/abort_many"
SESSION = "X-Session-ID"
"""The header of a single call that names the rollout's trace; in a batch the call's own id begins with it."""
MEDIA = frozenset({"content_parts", "features"})
"""Fields of a call with images: such calls are large and go one by one."""
MISSING = frozenset({404, 405})
LINE = re.compile(rb"\s*\[\s*(\d+)\s*,\s*(\d+)\s*,\s*(.*)\]\s*", re.DOTALL)
"""Index, status and body of a line; the body is read by whoever made the call."""


class NoBatches(Exception):
    """The engine has no route for batches."""


@dataclass(frozen=True)
class AnswerBytes:
    """As much of a response as verifiers' client reads."""

    content: bytes


@dataclass(eq=False)
class Call:
    """One call and its answer to come."""

    body: dict[str, Any]
    answer: "asyncio.Future[bytes]"
    request_id: str
    batch: "asyncio.Task[None] | None" = None
    """What reads the answer, once the call has been sent."""


class Batches:
    """The calls to one engine from one event loop; raises what the openai client raises for single requests.

    A call that is cancelled is aborted at the engine; so is all of a batch when its last caller is gone.
    """

    def __init__(self, client: "AsyncOpenAI", config: "BaseClientConfig") -> None:
        import httpx
        from verifiers.v1.clients.base import DEFAULT_LIMITS
        from verifiers.v1.configs.client import resolve_api_key, resolve_headers

        headers = httpx.Headers({"Authorization": f"Bearer {resolve_api_key(config)}"})
        headers.update(resolve_headers(config))
        # A batch is silent while all its calls are under way: each caller measures its own silence.
        timeout = httpx.Timeout(**config.timeout.model_dump() | {"read": None})
        self.http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=DEFAULT_LIMITS)
        self.root = str(client.base_url).rstrip("/").removesuffix("/v1")
        self.read_seconds = config.timeout.read
        self.users = 0
        self.served = True
        """Whether the engine has the route, as far as is known."""
        self._status_error = client._make_status_error_from_response
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Call] = []
        self._unfinished: dict[asyncio.Task[None], set[Call]] = {}
        self._aborted: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()

    async def ask(self, body: dict[str, Any], session: str) -> bytes:
        """Return the engine's answer to one call of a session, whose id begins the call's own.

        Raises openai's errors, and NoBatches where the engine has no such route.
        """
        import httpx
        from openai import APITimeoutError

        call = Call(body, self._loop.create_future(), f"{session}-{uuid.uuid4().hex}")
        self._waiting.append(call)
        if len(self._waiting) >= FULL:
            self._send_waiting()
        elif self._timer is None:
            self._wait_for_more(self._loop.time() + LONGEST_SECONDS)
        try:
            async with asyncio.timeout(self.read_seconds):
                return await call.answer
        except TimeoutError:
            raise APITimeoutError(httpx.Request("POST", self.root + BATCH)) from None
        finally:
            self._forget(call)

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.http.aclose()

    def _wait_for_more(self, latest: float) -> None:
        self._timer = self._loop.call_later(QUIET_SECONDS, self._send_if_quiet, len(self._waiting), latest)

    def _send_if_quiet(self, number: int, latest: float) -> None:
        # asyncio's own list of what is ready to run; a loop without one counts as idle.
        busy = len(self._waiting) > number or bool(getattr(self._loop, "_ready", ()))
        if busy and self._loop.time() < latest:
            return self._wait_for_more(latest)
        self._send_waiting()

    def _send_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        calls, self._waiting, self._timer = self._waiting, [], None
        if calls:
            batch = self._start(self._send(calls))
            self._unfinished[batch] = set(calls)
            for call in calls:
                call.batch = batch

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self, calls: Sequence[Call]) -> None:
        """Send a batch, and give every call its answer or an error."""
        import httpx
        from openai import APIConnectionError, APITimeoutError

        request = httpx.Request("POST", self.root + BATCH)
        ending: APIConnectionError = APIConnectionError(request=request)
        try:
            await self._read_answers(calls, request)
        except httpx.TimeoutException as error:
            ending = APITimeoutError(request)
            ending.__cause__ = error
        except Exception as error:
            ending.__cause__ = error
        finally:
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(_copy_error(ending))
            self._unfinished.pop(calls[0].batch, None)  # type: ignore[arg-type]

    async def _read_answers(self, calls: Sequence[Call], request: "httpx.Request") -> None:
        import httpx
        from pydantic_core import to_json

        bodies = [{**call.body, "request_id": call.request_id} for call in calls]
        content = to_json({"requests": bodies})
        del bodies
        as_json = {"Content-Type": "application/json"}
        async with self.http.stream("POST", self.root + BATCH, content=content, headers=as_json) as response:
            if response.status_code != 200:
                await response.aread()
                return self._refuse(calls, response)
            rest = b""
            async for chunk in response.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if not (parts := LINE.fullmatch(line)):
                        raise httpx.DecodingError(f"no answer to a call: {line[:200]!r}", request=request)
                    index, status, body = int(parts[1]), int(parts[2]), parts[3]
                    self._finish(calls[index], status, body, request)

    def _finish(self, call: Call, status: int, body: bytes, request: "httpx.Request") -> None:
        import httpx

        if call.answer.done():
            return
        if status == 200:
            call.answer.set_result(body)
        else:
            call.answer.set_exception(self._status_error(httpx.Response(status, content=body, request=request)))

    def _refuse(self, calls: Sequence[Call], response: "httpx.Response") -> None:
        """Give all calls the error with which a whole batch was refused."""
        self.served = self.served and response.status_code not in MISSING
        for call in calls:
            if not call.answer.done():
                missing = response.status_code in MISSING
                call.answer.set_exception(NoBatches() if missing else self._status_error(response))

    def _forget(self, call: Call) -> None:
        """Abort a call whose caller is gone; nothing is left to do for one that was answered."""
        if call.batch is None:
            if call in self._waiting:
                self._waiting.remove(call)
            return
        unfinished = self._unfinished.get(call.batch)
        if unfinished is None:
            return
        unfinished.discard(call)
        if call.answer.cancelled():
            if all(each.answer.done() for each in unfinished):
                call.batch.cancel()  # closes the connection, which aborts what is left of the batch
                return
            self._aborted.append(call.request_id)
            if len(self._aborted) == 1:
                self._start(self._abort())

    async def _abort(self) -> None:
        import httpx

        aborted, self._aborted = self._aborted, []
        with suppress(httpx.HTTPError):  # the engine then finishes what nobody waits for
            await self.http.post(self.root + ABORT, json={"request_ids": aborted})


def _copy_error(error: "APIConnectionError") -> "APIConnectionError":
    """Return another error alike: each caller raises its own."""
    from openai import APIConnectionError, APITimeoutError

    timeout = isinstance(error, APITimeoutError)
    copy = APITimeoutError(error.request) if timeout else APIConnectionError(request=error.request)
    copy.__cause__ = error.__cause__
    return copy


_policies: dict[str, list[Any]] = {}
"""By the id of an answer that is not committed yet: which policies sampled how many of its tokens."""


def _note_policies(answer: bytes) -> AnswerBytes:
    """Return an answer whose policies are noted, if it says which sampled it, until its reply is committed."""
    if by := sampled_by(answer):
        _policies[by.request_id] = by.runs
    return AnswerBytes(answer)


_batches: dict[tuple[asyncio.AbstractEventLoop, str], Batches] = {}
"""By event loop and settings of the client: verifiers makes a client for every 32 rollouts, and all share a batch."""


def require_own_pictures(body: Any, address: str) -> None:
    """Raise openai's BadRequestError for a call with a picture that is elsewhere, too large or broken."""
    for part in body.get("content_parts") or () if isinstance(body, dict) else ():
        if problem := picture_problem(str(part.get("url"))):
            import httpx
            from openai import BadRequestError

            response = httpx.Response(400, request=httpx.Request("POST", address), text=problem)
            raise BadRequestError(problem, response=response, body=None)


class BatchingClient:
    """An openai client whose calls of the generate route are sent in batches; everything else is the client's own."""

    def __init__(self, client: "AsyncOpenAI", config: "BaseClientConfig") -> None:
        self._client = client
        self._config = config
        self._key = config.model_dump_json()
        self._with_policies = POLICIES_HEADER in config.headers
        self._own: Batches | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def post(self, path: str, *, body: Any = None, options: Any = None, **others: Any) -> Any:
        """Return the engine's answer; raises openai's errors."""
        options = options or {}
        require_own_pictures(body, str(self._client.base_url))
        session = options.get("headers", {}).get(SESSION, "")
        turns = turns_of(session) if path.endswith(SINGLE) else None
        request = digest(body) if turns else ""
        if turns and (known := turns.recall(request)) is not None:
            return _note_policies(known)
        batches = self._batches()
        # The single route does not say which policies sampled an answer.
        batched = self._with_policies or not MEDIA & body.keys()
        answer: Any = None
        if batches.served and path.endswith(SINGLE) and batched:
            with suppress(NoBatches):
                answer = _note_policies(await batches.ask(body, session))
        if answer is None:
            answer = await self._client.post(path, body=body, options=options, **others)
        if turns:
            turns.keep(request, body["model"], answer.content)
        return answer

    async def close(self) -> None:
        """Close both; a batch lasts while another client uses it."""
        if (own := self._own) is not None:
            self._own = None
            own.users -= 1
            if not own.users:
                _batches.pop((own._loop, self._key), None)
                await own.close()
        await self._client.close()

    def _batches(self) -> Batches:
        if self._own is None:
            place = asyncio.get_running_loop(), self._key
            if place not in _batches:
                _batches[place] = Batches(self._client, self._config)
            self._own = _batches[place]
            self._own.users += 1
        return self._own


def install_batched_calls() -> None:
    """Patch verifiers so that the clients of this process that sample tokens send batches. Idempotent.

    A version without the function that makes them is left as it is.
    """
    from verifiers.v1.clients import train
    from verifiers.v1.graph import PendingTurn

    build = getattr(train, "build_async_openai", None)
    if build is None or hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def build_batching(config: "BaseClientConfig") -> BatchingClient:
        return BatchingClient(build(config), config)

    train.build_async_openai = build_batching
    commit = PendingTurn.commit

    def commit_and_note(self: Any, response: Any) -> int:
        node: int = commit(self, response)
        if (runs := _policies.pop(response.id, None)) is not None:
            self.trace.info.setdefault(POLICIES_FIELD, {})[str(node)] = runs
        return node

    PendingTurn.commit = commit_and_note
