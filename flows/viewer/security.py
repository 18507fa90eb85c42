"""Who is let in, and what a page may do: the token, the names that are answered to, and the headers of every answer."""

import hashlib
import re
import secrets
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
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
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@\s]+)(:[0-9]{1,5})?")


class Guard:
    """Stands before the application: other hosts' names are refused, so that no page of theirs can read a store.

    A page elsewhere whose name is made to point here (DNS rebinding) brings that name in `Host`, and is turned away. A
    number for an address cannot be made to point elsewhere; where a token is asked for, any of this machine's is right.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = (), token: str = "") -> None:
        self._app = app
        self._hosts = {*LOOPBACK, *(name.lower() for name in hosts if name)}
        self._token = token
        # Cookies know no ports: each viewer on a machine has its own, which holds no token but what proves it.
        self._pass = hashlib.sha256(_bytes(token)).hexdigest()
        self._cookie = f"{COOKIE}_{hashlib.sha256(self._pass.encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or let it through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if not self._answers_to(host_name(headers.get("host", ""))):
            return PlainTextResponse("This viewer does not answer to that name; see --host.\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This viewer only reads.\n", 405, {"Allow": "GET, HEAD"})
        return self._unknown(scope, headers) if self._token else None

    def _answers_to(self, name: str) -> bool:
        return name in self._hosts or (bool(self._token) and _is_number(name))

    def _unknown(self, scope: Scope, headers: Headers) -> Response | None:
        """Turn away who brings no token; who brings it in the address gets it as a cookie and the address without."""
        asked = parse_qsl(scope["query_string"].decode("ascii", "replace"), keep_blank_values=True)
        if any(name == "token" and _same(value, self._token) for name, value in asked):
            answer = RedirectResponse(_without_token(scope, asked), 303)
            # Lax, not strict: the address may be clicked in a mail, and only reading can be asked for.
            answer.set_cookie(self._cookie, self._pass, httponly=True, samesite="lax")
            return answer
        cookies = cookie_parser(headers.get("cookie", ""))  # those of others on this host may be anything
        if _same(cookies.get(self._cookie, ""), self._pass) or _same(_bearer(headers), self._token):
            return None
        return PlainTextResponse("Open the address that `stagecoach view` printed: it holds the token.\n", 401)


def host_name(given: str) -> str:
    """Return the name out of a Host header, without its port, in small letters; nothing where it is no such header."""
    found = _HOST.fullmatch(given)
    return found[1].lower() if found else ""


def _is_number(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_token(scope: Scope, asked: Sequence[tuple[str, str]]) -> str:
    """Return the address that was asked for without its token; one of this host, whatever it looks like."""
    rest = urlencode([(name, value) for name, value in asked if name != "token"])
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.decode("ascii", "replace").partition("?")[0]
    # One slash at the beginning: two, or a backslash, would be another host's address.
    return "/" + path.lstrip("/\\") + (f"?{rest}" if rest else "")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending


def _bearer(headers: Headers) -> str:
    kind, _, given = headers.get("authorization", "").partition(" ")
    return given if kind.lower() == "bearer" else ""


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(_bytes(given), _bytes(token))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # an environment variable may hold anything
