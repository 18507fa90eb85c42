"""Serving: `stagecoach view` from its arguments to a page in a browser, on the loopback unless told."""

import ipaddress
import os
import secrets
import socket
import webbrowser
from threading import Timer

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.viewer import addresses
from flows.viewer.library import Library

PORT = 8265
PORTS_TRIED = 20
NICENESS = 10
"""A run on the same machine comes first; see benchmarks/viewing.md."""
TOKEN = "STAGECOACH_VIEW_TOKEN"
"""The environment variable that a token is taken from: a command line can be read by others on the machine."""


def main(store: str = "", run: str = "", host: str = "127.0.0.1", port: int | None = None, browse: bool = False) -> int:
    """Serve a store until interrupted; return 0.

    Raises LayoutError where there is no store, NotThere for an unknown run, ConfigError where the port is taken.
    """
    import uvicorn

    from flows.viewer.web.app import application

    library = Library.at(store or RunConfig().store)
    if run:
        run = library.latest() if run == "latest" else run
        library.frames(run)
    loopback = is_loopback(host)
    token = os.environ.get(TOKEN, "") or ("" if loopback else secrets.token_urlsafe(24))
    listening = listen(host, port)
    url = address(host, listening.getsockname()[1], run, token)
    print(f"Looking at {library.store.root.address}: {url}\nIt only reads. Ctrl-C ends it.", flush=True)
    if browse:
        Timer(0.5, webbrowser.open, (url,)).start()
    os.nice(NICENESS)
    names = () if loopback else (host, socket.gethostname(), socket.getfqdn())
    app = application(library, tuple(dict.fromkeys(names)), token)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False))
    server.run(sockets=[listening])
    return 0


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int | None = None) -> socket.socket:
    """Return a socket that listens; without a port the first free one from `PORT` on. 0 lets the system choose.

    Raises ConfigError where the address cannot be had.
    """
    wanted = range(PORT, PORT + PORTS_TRIED) if port is None else (port,)
    problem: OSError | None = None
    for each in wanted:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host.strip("[]"), each))
        except OSError as error:
            found.close()
            problem = error
            continue
        found.listen()
        return found
    raise ConfigError([f"--host {host} --port {port or PORT}: {problem}; nothing was started: name another port"])


def address(host: str, port: int, run: str, token: str) -> str:
    """Return what to open in a browser."""
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    path = addresses.run(run) if run else addresses.runs()
    return f"http://{shown}:{port}{path}{f'?token={token}' if token else ''}"
