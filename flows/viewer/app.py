"""The application: every address of the viewer, answered as a page, as JSON, or as one file to keep."""

import logging
from collections.abc import Callable, Mapping
from threading import BoundedSemaphore
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from configs.errors import ConfigError
from flows.queries.request import BadQuestion, NotThere, PageRequest
from flows.queries.store_reader import StoreReader
from flows.reporting.texts import cut
from flows.viewer import rendering
from flows.viewer.addresses import PATTERNS, Page
from flows.viewer.pages import PAGES
from flows.viewer.security import Guard
from storage.errors import StoreError, border

FORMATS = ("html", "json", "file")
AT_ONCE = 2
"""Pages that are read at the same time: a person looks at one, and a run beside it needs the processor more."""
MOST_SAID = 4000
"""Characters of an error's message that are shown: it may repeat what was asked."""
METHODS = ["GET", "HEAD"]
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


def application(library: StoreReader, hosts: tuple[str, ...] = (), token: str = "") -> ASGIApp:
    """Return the application over a library.

    `hosts` are the names that it answers to beside those of the loopback; with a `token`, only who brings it is let in.
    """
    app = FastAPI(title="Stagecoach", docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/static", StaticFiles(directory=rendering.STATIC), name="static")
    app.add_api_route("/mark", lambda: {"mark": library.mark}, methods=METHODS)
    app.add_exception_handler(HTTPException, _unanswered)
    app.add_exception_handler(Exception, _broken)
    register_url_convertor("rest", Rest())
    turns = BoundedSemaphore(AT_ONCE)
    for name, pattern in PATTERNS.items():
        path = pattern.replace(":path}", ":rest}")
        app.add_api_route(path, _answering(name, library, turns), methods=METHODS, response_model=None)
    return Guard(app, hosts, token)  # around all of it: also what the framework answers by itself gets our headers


def _answering(name: str, library: StoreReader, turns: BoundedSemaphore) -> Callable[[Request], Response]:
    read = PAGES[name]

    def answer(request: Request) -> Response:
        asked = PageRequest(_address(request), request.path_params, dict(request.query_params))
        with turns:
            return respond(read, library, asked)

    return answer


def _address(request: Request) -> str:
    """Return the path as it was written: an id may hold a slash, which is not one of the path."""
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    return raw.decode("ascii", "replace").partition("?")[0]


def respond(read: Callable[[StoreReader, PageRequest], Page], library: StoreReader, asked: PageRequest) -> Response:
    """Answer one address: the page, or what is wrong with it. The border where errors meant for people become pages."""
    form = asked.text("format") or "html"
    try:
        form = asked.one_of("format", FORMATS, "html")
        with border("reading the tables", library.store.root.address):
            now = library.still()
            return _formed(read(now, asked), form, asked, now.mark)
    except NotThere as error:
        return _mistake(404, "This is not in the store", str(error), form)
    except BadQuestion as error:
        return _mistake(400, "This cannot be answered", str(error), form)
    except (StoreError, ConfigError) as error:
        _log.warning("%s could not be answered", asked.address, exc_info=error)
        return _mistake(503, "The store cannot be read", str(error), form)


def _unanswered(request: Request, error: Exception) -> Response:
    """Answer what no page answers: an unknown path, a method that is not ours."""
    assert isinstance(error, HTTPException)
    told = "there is no page at this address" if error.status_code == 404 else str(error.detail)
    return _mistake(error.status_code, "There is no such page", told, request.query_params.get("format", ""))


def _broken(request: Request, error: Exception) -> Response:
    """Answer where the viewer itself is at fault; the server writes the traceback to its log, and none to the page."""
    told = "This page could not be made. Nothing was changed; what went wrong is in the log of `stagecoach view`."
    return _mistake(500, "The viewer failed", told, request.query_params.get("format", ""))


def _formed(page: Page, form: str, asked: PageRequest, mark: str) -> Response:
    if form == "json":
        return Response(rendering.as_json(page), media_type="application/json")
    if form == "file":
        headers = {"Content-Disposition": f'attachment; filename="{rendering.file_name(page)}"'}
        return Response(rendering.as_file(page, asked), media_type="text/html; charset=utf-8", headers=headers)
    return Response(rendering.as_html(page, asked, mark if page.live else ""), media_type="text/html; charset=utf-8")


def _mistake(status: int, title: str, message: str, form: str) -> Response:
    said: Mapping[str, Any] = {"status": status, "error": title, "message": cut(message, MOST_SAID)[0]}
    page = Page("mistake.html", title, said)
    if form == "json":
        return Response(rendering.as_json(page), status, media_type="application/json")
    return Response(rendering.as_html(page, PageRequest("")), status, media_type="text/html; charset=utf-8")
