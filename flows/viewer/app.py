"""The application: every address of the viewer, answered as a page, as JSON, or as one file to keep; and its guard.

The guard says who is let in, and what a page may do: the token, the names that are answered to, and the headers.
"""

import asyncio
import hashlib
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import ip_address
from threading import BoundedSemaphore
from urllib.parse import parse_qsl, urlencode
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request, cookie_parser
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.errors import ConfigError
from flows.queries.request import BadQuestion, NotThere, PageRequest
from flows.queries.store_reader import StoreReader
from flows.reporting.formats import cut
from flows.viewer import rendering
from flows.viewer.addresses import Page
from flows.viewer.routes import page_at, read_page
from storage.errors import StoreError
from storage.read.damage import reading

FORMATS = ("html", "json", "file")
AT_ONCE = 2
"""Pages that are read at the same time: a person looks at one, and a run beside it needs the processor more."""
MAX_SEARCHES = min(os.cpu_count() or 1, 2)
"""Searches that run at the same time: each may take a processor and the memory of `condition_process.LIMITS`."""
MOST_SAID = 4000
"""Characters of an error's message that are shown: it may repeat what was asked."""
UNKNOWN = "There is no such page"
_log = logging.getLogger("stagecoach")


class Rest(Convertor[str]):
    """The rest of a path, whatever it holds: the one that the framework has ends at a line break."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        """Return what was matched."""
        return value

    def to_string(self, value: str) -> str:
        """Return it as a part of an address; `addresses` writes them."""
        return value


def application(reader: StoreReader, hosts: tuple[str, ...] = (), token: str = "") -> ASGIApp:
    """Return the application over a store.

    `hosts` are the names that it answers to beside those of the loopback; with a `token`, only who brings it is let in.
    """
    register_url_convertor("rest", Rest())
    # One for all addresses: what is short is the processor, whichever page takes it.
    turns, queue = BoundedSemaphore(AT_ONCE), SearchQueue()

    def read(name: str, request: PageRequest) -> Response:
        with turns:
            return respond(name, reader, request)

    async def answer(http: Request) -> Response:
        name, request = _page_request(http)
        if name != "search":
            return await run_in_threadpool(read, name, request)
        disconnected = asyncio.create_task(_disconnect(http))
        disconnected.add_done_callback(lambda _: request.reader_gone.set())
        try:
            async with queue.turn(http.client.host if http.client else ""):
                if request.reader_gone.is_set():
                    return Response(status_code=499)  # as nginx writes it; no reader sees it
                return await run_in_threadpool(respond, name, reader, request)
        finally:
            disconnected.cancel()

    static = StaticFiles(directory=rendering.STATIC)
    # No coroutine: the mark is read from files, under a lock, so in a thread.
    mark = Route("/mark", lambda _: JSONResponse({"mark": reader.mark}))
    routes = [Mount("/static", static), mark, Route("/{path:rest}", answer)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _answer_refusal, Exception: _answer_fault})
    small = GZipMiddleware(app, compresslevel=5)  # higher levels take twice as long for a twentieth less
    return Guard(small, hosts, token)  # around all of it: also what the framework answers by itself gets our headers


class SearchQueue:
    """The turns of searches: one at a time per client, in their order, and MAX_SEARCHES of all clients.

    A search that waits is a coroutine and takes no thread, so that other pages never wait for it.
    """

    def __init__(self) -> None:
        self._searches = asyncio.Semaphore(MAX_SEARCHES)
        self._clients: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for the turn of a client's search, which is over at the end of the block."""
        lock = self._clients.setdefault(client, asyncio.Lock())
        async with lock, self._searches:
            yield


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _page_request(http: Request) -> tuple[str, PageRequest]:
    try:
        name, request = page_at(_raw_path(http.scope), dict(http.query_params))
    except NotThere:
        raise HTTPException(404, "there is no page at this address") from None
    return name, replace(request, from_other_site=_from_other_site(http.headers))


def _from_other_site(headers: Headers) -> bool:
    # Browsers send the header to the loopback and over HTTPS; other clients are no pages of a site.
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _raw_path(scope: Scope) -> str:
    """Return the path as it was written: an id may hold a slash, which is not one of the path."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("ascii", "replace").partition("?")[0]


def respond(name: str, reader: StoreReader, request: PageRequest) -> Response:
    """Answer one address: the page, or what is wrong with it. The border where errors meant for people become pages."""
    form = request.text("format") or "html"
    try:
        form = request.one_of("format", FORMATS, "html")
        with reading(reader.store):
            # One moment for the whole page: a run may commit while it is being read.
            moment = reader.still()
            page = read_page(name, moment, request)
            response = _respond(page, form, request, moment.mark if page.live else "")
    except NotThere as error:
        return _mistake(404, "This is not in the store", str(error), form)
    except BadQuestion as error:
        return _mistake(400, "This cannot be answered", str(error), form)
    except (StoreError, ConfigError) as error:
        _log.warning("%s could not be answered", request.address, exc_info=error)
        return _mistake(503, "The store cannot be read", str(error), form)
    if form == "file":
        response.headers["Content-Disposition"] = f'attachment; filename="{rendering.file_name(page)}"'
    return response


def _respond(page: Page, form: str, request: PageRequest, mark: str = "", status: int = 200) -> Response:
    if form == "json":
        return Response(rendering.as_json(page), status, media_type="application/json")
    html = rendering.as_file(page, request) if form == "file" else rendering.as_html(page, request, mark)
    return Response(html, status, media_type="text/html; charset=utf-8")


def _answer_refusal(http: Request, error: Exception) -> Response:
    """Answer what no page answers: an unknown path, a method that is not ours."""
    assert isinstance(error, HTTPException)
    return _mistake(error.status_code, UNKNOWN, str(error.detail), http.query_params.get("format", ""))


def _answer_fault(http: Request, error: Exception) -> Response:
    """Answer where the viewer itself is at fault; the server writes the traceback to its log, and none to the page."""
    message = "This page could not be made. Nothing was changed; what went wrong is in the log of `stagecoach view`."
    return _mistake(500, "The viewer failed", message, http.query_params.get("format", ""))


def _mistake(status: int, title: str, message: str, form: str) -> Response:
    # The form is whatever was asked for, which may be what is wrong: all but json is answered as HTML.
    values = {"status": status, "error": title, "message": cut(message, MOST_SAID)[0]}
    return _respond(
        Page("mistake.html", title, values), form if form == "json" else "html", PageRequest(""), "", status
    )


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
        # The name is checked first: who brings another host's does not learn whether a token is asked for.
        if not self._answers_to(host_name(headers.get("host", ""))):
            return PlainTextResponse("This viewer does not answer to that name; see --host.\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This viewer only reads.\n", 405, {"Allow": "GET, HEAD"})
        # A page of another site may lead a person here, by a link, but load nothing from here: no image, no frame.
        if _from_other_site(headers) and headers.get("sec-fetch-dest") != "document":
            return PlainTextResponse("This viewer answers no requests of other sites' pages.\n", 403)
        return self._unknown(scope, headers) if self._token else None

    def _answers_to(self, name: str) -> bool:
        return name in self._hosts or (bool(self._token) and _is_number(name))

    def _unknown(self, scope: Scope, headers: Headers) -> Response | None:
        """Turn away who brings no token; who brings it in the address gets it as a cookie and the address without."""
        # Empty values are kept: the rest of the question goes along as it was asked.
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
    # One slash at the beginning: two, or a backslash, would be another host's address.
    return "/" + _raw_path(scope).lstrip("/\\") + (f"?{rest}" if rest else "")


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
    # It takes as long however much of the token is right, so that nobody finds it letter by letter.
    return secrets.compare_digest(_bytes(given), _bytes(token))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # an environment variable may hold anything
