"""An S3 server on loopback in a process of its own: `python -m tests.storage.s3_server PARENT`, ends with its parent.

It prints its port. Objects, listings, ranges, multipart uploads and conditional puts are moto's. Around it stands what
tests need and moto does not do: each request is alone (S3 decides a conditional put at one moment, moto looks first and
writes later), requests are noted, and by `PUT /-/mode?...` the server misbehaves:

    conditional=ignored    puts are done whatever their condition says, as on some servers
    conditional=unknown    a put with a condition is answered 501, as on some others
    lost=N                 the next N conditional puts of log files are done and answered 500
    conflict=N             the next N conditional puts are not done and answered 409: another one is under way
    region=NAME            every request is answered 301: the bucket is in another region
    missing=all            every request is answered 404 without a word, as by a server that is none for S3
    denied=all, puts       requests, or puts alone, are answered 403

`GET /-/requests` returns the requests since the last look, one `METHOD path?query` on a line, ` if-none-match` after
those with that condition.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Respond = Callable[..., Any]


class Quiet(WSGIRequestHandler):
    """A handler that keeps connections and does not write a line for each request."""

    protocol_version = "HTTP/1.1"

    def log_request(self, *_: Any) -> None:
        """Say nothing."""


class Server:
    """The WSGI application: one request at a time, counted, spoilt where a test asked for it."""

    def __init__(self) -> None:
        self.inner = DomainDispatcherApplication(create_backend_app)
        self.lock = threading.Lock()
        self.mode: dict[str, str] = {}
        self.seen: list[str] = []

    def __call__(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        """Answer one request."""
        path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        with self.lock:
            if path == "/-/mode":
                self.mode = {name: values[0] for name, values in parse_qs(query).items()}
                return _answer(respond, "200 OK", b"")
            if path == "/-/requests":
                seen, self.seen = self.seen, []
                return _answer(respond, "200 OK", "\n".join(seen).encode())
            told = " if-none-match" if "HTTP_IF_NONE_MATCH" in environ else ""
            self.seen.append(f"{environ['REQUEST_METHOD']} {path}{'?' if query else ''}{query}{told}")
            return self._spoilt(environ, respond)

    def _spoilt(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        if region := self.mode.get("region"):
            return _answer(respond, "301 Moved Permanently", b"<Error/>", ("x-amz-bucket-region", region))
        if self.mode.get("missing"):
            return _answer(respond, "404 Not Found", b"")
        put = environ["REQUEST_METHOD"] == "PUT"
        if self.mode.get("denied") == "all" or (put and self.mode.get("denied") == "puts"):
            return _answer(respond, "403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>")
        conditional = put and "HTTP_IF_NONE_MATCH" in environ
        if conditional and self.mode.get("conditional") == "ignored":
            del environ["HTTP_IF_NONE_MATCH"]
        if conditional and self.mode.get("conditional") == "unknown":
            return _answer(respond, "501 Not Implemented", b"<Error><Code>NotImplemented</Code></Error>")
        conflicts = int(self.mode.get("conflict", "0"))
        if conditional and conflicts:
            self.mode["conflict"] = str(conflicts - 1)
            return _answer(respond, "409 Conflict", b"<Error><Code>ConditionalRequestConflict</Code></Error>")
        lost = int(self.mode.get("lost", "0"))
        if conditional and lost and environ["PATH_INFO"].endswith(".json"):
            self.mode["lost"] = str(lost - 1)
            list(self.inner(environ, lambda *_: None))
            return _answer(respond, "500 Internal Server Error", b"<Error><Code>InternalError</Code></Error>")
        return list(self.inner(environ, respond))


def _answer(respond: Respond, status: str, body: bytes, *headers: tuple[str, str]) -> list[bytes]:
    respond(status, [("Content-Length", str(len(body))), *headers])
    return [body]


def main(parent: int) -> None:
    """Serve on a port that the system chose until the parent is gone."""
    server = make_server("127.0.0.1", 0, Server(), threaded=True, request_handler=Quiet)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while os.getppid() == parent:
        time.sleep(0.5)


if __name__ == "__main__":
    main(int(sys.argv[1]))
