"""How the harness asks the interception endpoint: within this process where its server runs here, else over HTTP."""

import asyncio
import functools
import json
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

import aiohttp
from multidict import CIMultiDict
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import InterceptionError
from verifiers.v1.interception.server import InterceptionServer

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30)
PATH = "/chat/completions"
FAILED = 500, "500 Internal Server Error"
"""What a web server answers for a handler that raised."""

_log = logging.getLogger(__name__)
_servers: dict[str, tuple[InterceptionServer, asyncio.AbstractEventLoop]] = {}
"""The interception servers of this process and their event loops, by the secrets of the rollouts registered there."""


class Endpoint(Protocol):
    """Where a rollout's model calls go."""

    async def ask(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, str]:
        """Return status and text of the answer to one model call.

        Raises InterceptionError where there is no answer.
        """


async def connect(endpoint: str, secret: str, stack: AsyncExitStack) -> Endpoint:
    """Return the endpoint of the rollout with this secret; what it opens lives as long as `stack`."""
    server, loop = _servers.get(secret, (None, None))
    if server is not None and loop is asyncio.get_running_loop():
        return InProcess(server)
    # One connection for all turns: a new one for each takes three times the processor time of its request.
    return OverHttp(f"{endpoint}{PATH}", await stack.enter_async_context(aiohttp.ClientSession(timeout=TIMEOUT)))


class OverHttp:
    """An interception server at a URL."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def ask(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, str]:
        """Return status and text of the answer to one model call; raises InterceptionError where there is none."""
        try:
            async with self.session.post(self.url, json=body, headers=headers) as response:
                return response.status, await response.text()
        except aiohttp.ClientError as error:
            raise InterceptionError(f"no answer from {self.url}: {error}") from error


class Request(dict[Any, Any]):
    """As much of a web request as a handler of the interception server uses; its items are the handler's own notes."""

    path = f"/v1{PATH}"

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__()
        self.headers = CIMultiDict(headers)
        self._read_bytes: bytes | None = body

    async def read(self) -> bytes | None:
        """Return the body; handlers drop it by `_read_bytes` afterwards."""
        return self._read_bytes


class InProcess:
    """An interception server of this event loop, whose own handler is called: limits, retries and records are its."""

    def __init__(self, server: InterceptionServer) -> None:
        self.handle = server._handler_for(_DIALECT)

    async def ask(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, str]:
        """Return status and text of the answer to one model call.

        Raises InterceptionError where the server has ended the handler.
        """
        # A task of its own, as for a request over HTTP: the server cancels those of a rollout that is over. Nor does it
        # notice a client that is gone, so a cancelled rollout leaves its handler to the server.
        handler = asyncio.ensure_future(self.handle(Request(json.dumps(body).encode(), headers)))
        await asyncio.wait({handler})
        if handler.cancelled():
            raise InterceptionError("no answer: the interception server has ended the call")
        if (error := handler.exception()) is not None:
            _log.error("the interception server failed", exc_info=error)
            return FAILED
        response = handler.result()
        return response.status, response.text or ""


_DIALECT = ChatDialect()


def note_servers() -> None:
    """Patch verifiers so that `connect` finds the servers of this process. Idempotent.

    A version whose server has other methods is left as it is: all calls go over HTTP.
    """
    register, unregister = (getattr(InterceptionServer, name, None) for name in ("register", "unregister"))
    has_handler = hasattr(InterceptionServer, "_handler_for")
    if register is None or unregister is None or not has_handler or hasattr(register, "__wrapped__"):
        return

    @functools.wraps(register)
    def note(self: InterceptionServer, session: Any) -> tuple[str, str]:
        secrets: tuple[str, str] = register(self, session)
        _servers[secrets[0]] = self, asyncio.get_running_loop()
        return secrets

    @functools.wraps(unregister)
    def forget(self: InterceptionServer, model_secret: str, state_secret: str) -> None:
        _servers.pop(model_secret, None)
        unregister(self, model_secret, state_secret)

    InterceptionServer.register, InterceptionServer.unregister = note, forget
