"""An engine that answers nothing hangs, and one that computes for long does not; with real processes."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tasks.inference.engine import hanging
from tasks.inference.engine.hanging import hangs
from tests.fixtures.faults import happened

pytestmark = pytest.mark.engine
SECONDS = 1.0
SERVER = """
import subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
behind = subprocess.Popen([sys.executable, "-c", sys.argv[1]]) if sys.argv[1] else None
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/is_sleeping" and behind:
            time.sleep(3600)
        self.send_response(200)
        self.end_headers()
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(server.server_address[1], flush=True)
server.serve_forever()
"""
IDLE, COMPUTING = "import time; time.sleep(3600)", "while True: pass"


@contextmanager
def server(behind=""):
    """A server, and a process behind it that answers none of its questions; gives its report."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, behind], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout
        yield {"url": f"http://127.0.0.1:{int(process.stdout.readline())}", "pid": process.pid}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.fault("services", "an engine's server is stopped", "it hangs, and no more once it goes on")
def test_a_stopped_server_hangs_until_it_goes_on():
    with server() as report:
        assert not hangs(report, "", SECONDS)
        os.kill(report["pid"], signal.SIGSTOP)
        happened(f"SIGSTOP to {report['pid']}")
        assert hangs(report, "", SECONDS)
        os.kill(report["pid"], signal.SIGCONT)
        assert not hangs(report, "", SECONDS)
    assert not hangs(report, "", SECONDS), "one that is gone has ended"


def test_an_engine_that_neither_answers_nor_computes_hangs():
    with server(IDLE) as report:
        assert hangs(report, "", SECONDS)


def test_an_engine_that_computes_is_waited_for_as_long_as_weights_may_take(monkeypatch):
    monkeypatch.setattr(hanging, "SERVE_SECONDS", 4.0)
    asked = []
    ask = hanging._leaves_unanswered
    monkeypatch.setattr(
        hanging,
        "_leaves_unanswered",
        lambda address, key, seconds: (asked.append(seconds), ask(address, key, seconds))[1],
    )
    with server(COMPUTING) as report:
        assert hangs(report, "", SECONDS)
        assert len(asked) >= 1 + 4 + 1, "the server, the engine for four seconds, the engine once more"
        asked.clear()
        assert hangs({"url": report["url"]}, "", SECONDS), "on another machine nobody sees whether it computes"
        assert len(asked) >= 1 + 4 + 1
