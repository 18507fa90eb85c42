"""The gateway: an OpenAI-compatible address for agents that their owners start, and rollouts to be taken.

It serves a directory in which the harness `program` publishes rollouts (`gateway` of its settings) by four files each:
ID.open.json, ID.taken.json once somebody has it, ID.end.json from its owner, all gone when the rollout has ended.
"""

import hmac
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import ClientConnectionError, ClientSession, ClientTimeout, web

_KEY = re.compile(r"Bearer ([0-9a-zA-Z-]+)\.(.+)")
"""A rollout's key: its id, and the secret of its interception server."""
_PASSED = ("Content-Type", "Idempotency-Key", "x-stainless-retry-count")


class Gateway:
    """The routes: `POST /rollouts` takes one, `POST /rollouts/end` ends it, `/v1/...` is the OpenAI API for both."""

    def __init__(self, directory: Path, key: str) -> None:
        """Serve a directory; with a key, only those who have it take rollouts."""
        self._directory, self._key = directory, key

    def application(self) -> web.Application:
        """Return the web application."""
        application = web.Application()
        application.router.add_post("/rollouts", self._take)
        application.router.add_post("/rollouts/end", self._end)
        application.router.add_route("*", "/v1/{path:.*}", self._relay)
        return application

    async def _take(self, request: web.Request) -> web.Response:
        """Hand an open rollout to one asker: id, prompt, system, model, base_url and api_key."""
        if self._key and not _is_same(request.headers.get("Authorization", ""), f"Bearer {self._key}"):
            raise web.HTTPUnauthorized(text="POST /rollouts needs the key of this gateway")
        for file in self._directory.glob("*.taken.json"):
            with suppress(FileNotFoundError):  # its rollout ended this moment
                if json.loads(file.read_text(encoding="utf-8"))["expires"] < time.time():
                    file.unlink()
        for file in self._directory.glob("*.open.json"):
            name = file.name.partition(".")[0]
            try:
                taken = file.rename(self._path(name, "taken"))  # of two askers one gets it
                rollout = json.loads(taken.read_text(encoding="utf-8"))
            except FileNotFoundError:
                continue
            if rollout["expires"] < time.time():  # of an environment server that was killed
                taken.unlink()
                continue
            here = {"base_url": f"http://{request.host}/v1", "api_key": f"{name}.{rollout['api_key']}"}
            return web.json_response({**rollout, **here})
        raise web.HTTPNotFound(text="no rollout is open")

    async def _end(self, request: web.Request) -> web.Response:
        """End the rollout of a key, with a reward or an error."""
        rollout, report = self._rollout(request), None
        with suppress(ValueError):
            report = await request.json()
        if not isinstance(report, dict) or not report.keys() <= {"reward", "error"}:
            raise web.HTTPBadRequest(text='the body is {"reward": NUMBER} or {"error": TEXT}')
        writing = self._path(rollout["id"], "new")
        writing.write_text(json.dumps(report), encoding="utf-8")
        writing.rename(self._path(rollout["id"], "end"))
        return web.json_response({"id": rollout["id"]})

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        """Pass a model call on to the interception server of its rollout, and the answer back as it comes."""
        rollout = self._rollout(request)
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        headers["Authorization"] = f"Bearer {rollout['api_key']}"
        url = f"{rollout['base_url']}/{request.match_info['path']}"
        try:
            async with (
                ClientSession(timeout=ClientTimeout(total=None)) as session,
                session.request(request.method, url, headers=headers, data=request.content) as answer,
            ):
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except ClientConnectionError:
            raise web.HTTPServiceUnavailable(text="the environment server of the rollout is gone") from None

    def _rollout(self, request: web.Request) -> dict[str, Any]:
        """Return the rollout that was taken whose key a request has; answer with 401 where there is none."""
        if match := _KEY.fullmatch(request.headers.get("Authorization", "")):
            file = self._path(match[1], "taken")
            rollout: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            if _is_same(match[2], rollout.get("api_key", "")):
                return rollout
        raise web.HTTPUnauthorized(text="no rollout that was taken has this key")

    def _path(self, name: str, state: str) -> Path:
        return self._directory / f"{name}.{state}.json"


def _is_same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())
