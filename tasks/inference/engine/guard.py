"""Asks for the engine's key on every route: vLLM's own check covers `/v1` alone, and not pause, resume or reload.

A class that vLLM's server loads by name (`--middleware`), in plain ASGI.
"""

import hmac
import os

from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = "/health"
"""The one route without a key: it says whether the engine lives, and nothing of what it serves."""
REFUSED = 401


class KeyGuard:
    """Answers 401 to a request without `Authorization: Bearer KEY`, where KEY is what VLLM_API_KEY holds."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        key = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope["path"] == OPEN or hmac.compare_digest(key, self._expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": REFUSED, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
