"""A whole Prefect server with its UI in one process, started as `python -P prefect_server.py REPORT PORT_FILE`.

It binds its port before it imports Prefect, so that its address is known in milliseconds, no other program can take
the port, and the UI is told the right one (`prefect server start --port` tells it 4200). The port is kept in PORT_FILE:
a server started again answers where the flow expects it.
"""

import json
import os
import socket
import sys
from pathlib import Path


def bind(port_file: Path) -> socket.socket:
    """Return a socket bound to the port in the file, or to one that the system chooses, which the file then holds."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # Or a restart within a minute finds its own port still taken.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", int(port_file.read_text()) if port_file.exists() else 0))
    port_file.write_text(str(bound.getsockname()[1]))
    return bound


def report(path: Path, port: int) -> None:
    """Write the server's address, all at once."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
    # Whoever polls for the file must never see half of it.
    draft.replace(path)


def serve(bound: socket.socket) -> None:
    """Serve the Prefect API and UI on a bound socket until SIGTERM."""
    port = bound.getsockname()[1]
    os.environ |= {"PREFECT_SERVER_API_PORT": str(port), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    import uvicorn
    from prefect.server.api.server import create_app

    # open event streams of browsers and flows would otherwise hold the end up
    config = uvicorn.Config(create_app(final=True), log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[bound])


if __name__ == "__main__":
    ready = bind(Path(sys.argv[2]))
    report(Path(sys.argv[1]), ready.getsockname()[1])
    serve(ready)
