"""`stagecoach view`, from its arguments to a page in a browser. It listens on the loopback by default."""

import ipaddress
import os
import secrets
import signal
import socket
import webbrowser
from contextlib import suppress
from threading import Timer
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp

from configs.store import default_store
from flows.queries.request import BadQuestion
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses

PORT = 8265
PORTS_TRIED = 20
NICENESS = 10
"""A run on the same machine comes first; see benchmarks/viewing.md."""
ENDED: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 0}
"""The exit status by the signal."""
TOKEN = "STAGECOACH_VIEW_TOKEN"
"""The environment variable that a token is taken from: a command line can be read by others on the machine."""


def main(store: str = "", run: str = "", host: str = "127.0.0.1", port: int | None = None, browse: bool = False) -> int:
    """Serve a store until a signal ends the process: with status 130 for Ctrl-C, 0 where it was asked to end.

    Raises LayoutError where there is no store, NotThere for an unknown run, BadQuestion where the port is taken.
    """
    from flows.viewer.app import application

    place = store or default_store()
    reader = StoreReader.at(place)
    if run:
        run = reader.latest() if run == "latest" else run
        # An unknown run is refused here, before anything is served.
        reader.frames(run)
    loopback = is_loopback(host)
    token = os.environ.get(TOKEN, "") or ("" if loopback else secrets.token_urlsafe(24))
    listening = listen(host, port)
    for sig in ENDED:
        signal.signal(sig, _end)
    url = address(host, listening.getsockname()[1], run, token)
    print(f"Looking at {place}: {url}\nIt only reads. Ctrl-C ends it.", flush=True)
    if browse:
        # A browser that is faster than the server below would be refused, and would say so for ever.
        opening = Timer(0.5, webbrowser.open, (url,))
        opening.daemon = True
        opening.start()
    os.nice(NICENESS)
    return _serve(application(reader, names(host), token), listening)


def _serve(app: ASGIApp, listening: socket.socket) -> int:
    """Answer until a signal comes; the process ends with it."""
    import uvicorn

    class Server(uvicorn.Server):
        """Ends as we do."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            _end(sig, frame)

    config = uvicorn.Config(
        app,
        log_level="warning",  # no line for each request: the token may be in its address
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
    )
    Server(config).run(sockets=[listening])
    return 0


def _end(sig: int, frame: Any) -> None:
    """End the process at once: it holds nothing that could be lost, and a page that is being read must not keep it."""
    with suppress(OSError, ValueError):  # who read our output may be gone
        print(flush=True)
    os._exit(ENDED[sig])


def names(host: str) -> tuple[str, ...]:
    """Return the names, as a browser sends them, that a viewer on a host answers to beside the loopback's."""
    if is_loopback(host):
        return (_in_brackets(host),)
    return tuple(dict.fromkeys((_in_brackets(host), socket.gethostname(), socket.getfqdn())))


def _in_brackets(host: str) -> str:
    """Return a host as it stands in an address: numbers of IPv6, which have colons, in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int | None = None) -> socket.socket:
    """Return a socket that listens; without a port the first free one from `PORT` on. 0 lets the system choose.

    Raises BadQuestion where the address cannot be had.
    """
    wanted = range(PORT, PORT + PORTS_TRIED) if port is None else (port,)
    problem: Exception | None = None
    for each in wanted:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = socket.socket(family, socket.SOCK_STREAM)
        # The port of a viewer that has just ended is still waiting for late packets; the next one may have it.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host.strip("[]"), each))
        except (OSError, OverflowError) as error:
            found.close()
            problem = error
            continue
        found.listen()
        return found
    raise BadQuestion(f"--host {host} --port {wanted[0]}: {problem}; nothing was started; name another port or host")


def address(host: str, port: int, run: str, token: str) -> str:
    """Return what to open in a browser: of all addresses of a machine its name, which others know it by."""
    anywhere = host.strip("[]") in ("0.0.0.0", "::", "")
    shown = socket.gethostname() if anywhere else _in_brackets(host)
    path = addresses.run(run) if run else addresses.runs()
    # An environment variable may hold bytes that are no text: they are replaced, as no address can hold them.
    shown_token = "?token=" + quote(token, safe="", errors="replace") if token else ""
    return f"http://{shown}:{port}{path}{shown_token}"
