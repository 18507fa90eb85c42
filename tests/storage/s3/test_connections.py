"""What the requests that we send ourselves make of the connections of a server, and of what comes over them."""

from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Barrier, Thread
from typing import ClassVar

import pytest

from storage import s3
from storage.s3 import Bucket

NUM_THREADS = 24


class Handler(BaseHTTPRequestHandler):
    """Answers as many requests at a time as there are threads, with the encodings that a request accepts."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[object]] = []
    together = Barrier(1)

    def setup(self) -> None:
        self.connections.append(self.client_address)
        super().setup()

    def do_GET(self) -> None:
        self.together.wait(timeout=30)
        body = self.headers["accept-encoding"].encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(Handler, "connections", [])
    monkeypatch.setattr(s3, "FIRST_PAUSE", 0.001)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield Bucket("bucket", "", f"http://127.0.0.1:{server.server_port}", "region", "key", "secret")
    server.shutdown()


def test_every_thread_keeps_its_connection(bucket, monkeypatch):
    monkeypatch.setattr(Handler, "together", Barrier(NUM_THREADS))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for _ in range(2):
            assert {*pool.map(bucket.get, ["key"] * NUM_THREADS)} == {b"identity"}
    assert len(Handler.connections) == NUM_THREADS
