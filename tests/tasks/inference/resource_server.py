"""A NeMo Gym resource server as small as one can be: it seeds sessions and verifies."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REWARD = 0.625


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of a session, and keeps what it was asked to verify."""

    verified: list[dict[str, Any]]

    def do_GET(self) -> None:
        """Say that the server is there."""
        self._answer({})

    def do_POST(self) -> None:
        """Seed a session, or verify a response."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/verify"):
            self.verified.append(asked)
            self._answer({**asked, "reward": REWARD, "length": len(asked["response"]["output"])})
        else:
            self._answer({})

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def resource_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve until the block ends; yield the address and what was verified so far."""
    verified: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"verified": verified}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", verified
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def dataset(path: Path) -> Path:
    """Write the rows of a dataset in the form of NeMo Gym; return the path."""
    asked = [{"role": "user", "content": "1 + 2"}]
    rows = [{"responses_create_params": {"input": asked, "tools": []}, "answer": 3, "extra": {"kept": [1.5, None]}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
