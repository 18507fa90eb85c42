"""Who is let in, and what a page may do: the token, the names that are answered to, and the headers of every answer."""

import secrets
from collections.abc import Sequence
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
COOKIE = "stagecoach_view"
HEADERS = {
    # Nothing but our own files runs or is loaded, whatever a rollout says.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Stands before the application: other hosts' names are refused, so that no page of theirs can read a store.

    A page elsewhere whose name is made to point here (DNS rebinding) brings that name in `Host`, and is turned away.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = (), token: str = "") -> None:
        self._app = app
        self._hosts = {*LOOPBACK, *hosts}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or let it through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if _host(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("This viewer does not answer to that name; see --host.\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This viewer only reads.\n", 405, {"Allow": "GET, HEAD"})
        return self._unknown(scope, headers) if self._token else None

    def _unknown(self, scope: Scope, headers: Headers) -> Response | None:
        """Turn away who brings no token; who brings it in the address gets it as a cookie and the address without."""
        if _same(_cookie(headers), self._token) or _same(_bearer(headers), self._token):
            return None
        asked = parse_qsl(scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
        if not any(name == "token" and _same(value, self._token) for name, value in asked):
            return PlainTextResponse("Open the address that `stagecoach view` printed: it holds the token.\n", 401)
        rest = urlencode([(name, value) for name, value in asked if name != "token"])
        path = scope.get("raw_path", scope["path"].encode()).decode("ascii", "replace")
        # One slash at the beginning: two would be another host's address.
        answer = RedirectResponse("/" + path.lstrip("/") + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
        return answer


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending


def _host(given: str) -> str:
    """Return the name out of a Host header, without its port."""
    if given.startswith("["):
        return given.partition("]")[0] + "]"
    return given.partition(":")[0].lower()


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _bearer(headers: Headers) -> str:
    kind, _, given = headers.get("authorization", "").partition(" ")
    return given if kind.lower() == "bearer" else ""


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(), token.encode())
