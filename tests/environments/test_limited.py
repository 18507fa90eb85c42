"""The guardian of a program: it ends with its command, and leaves nothing of it."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest
from program.harness import LIMITED

from tests.fixtures.faults import happened
from tests.fixtures.waiting import PATIENCE


@pytest.fixture
def run(tmp_path):
    """A function that runs a shell's command in limits and returns its status and what it printed."""
    (tmp_path / "prompt.txt").write_text("the prompt")

    def run(command, seconds=PATIENCE, ports="all"):
        limits = [str(seconds), "1000000", str(2**28), "PATH", ports, "prompt.txt"]
        arguments = [sys.executable, "-I", "-S", str(LIMITED), *limits, "sh", "-c", command]
        reading, writing = os.pipe()  # the environment server's end stays open
        try:
            done = subprocess.run(arguments, stdin=reading, capture_output=True, text=True, cwd=tmp_path, check=False)
        finally:
            os.close(reading), os.close(writing)
        return done.returncode, done.stdout + done.stderr

    return run


def require_namespaces(run):
    if run("true", ports="9")[0]:
        pytest.skip("this machine gives no namespaces to its users")


def test_what_it_printed_last_and_its_status_are_passed_on(run):
    status, text = run("cat; exit 3")
    assert status == 3 and "the prompt" in text


def test_a_child_that_prints_for_ever_does_not_keep_it(run, tmp_path):
    began = time.monotonic()
    status, _ = run("(while :; do echo more; sleep 0.01; done) & echo $! > child; exit 0")
    assert status == 0 and time.monotonic() - began < PATIENCE
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_memory_beyond_the_most_is_refused_to_it(run):
    status, text = run(f"{sys.executable} -c 'bytearray(2**29)'")
    assert status == 1 and "MemoryError" in text


@pytest.mark.fault("hostile agent", "a program without a network calls another service, or kills", "it reaches neither")
def test_without_a_network_it_reaches_its_ports_and_no_process_of_the_machine(run):
    require_namespaces(run)
    served = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [server.getsockname()[1] for server in served]
    call = 'import socket; socket.create_connection(("127.0.0.1", {})).send(b"it")'
    status, text = run(f"{sys.executable} -c '{call.format(ports[0])}'", ports=str(ports[0]))
    assert status == 0, text
    assert served[0].accept()[0].recv(9) == b"it"
    assert "refused" in run(f"{sys.executable} -c '{call.format(ports[1])}'", ports=str(ports[0]))[1]
    with subprocess.Popen(["sleep", "600"]) as other:
        happened(run(f"kill -9 {other.pid}", ports=str(ports[0]))[1])
        assert other.poll() is None
        other.kill()
    for server in served:
        server.close()


def test_without_a_network_a_server_that_is_away_ends_connections_and_does_not_keep_them(run):
    require_namespaces(run)
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        call = f'print(socket.create_connection(("127.0.0.1", {port}), {PATIENCE}).recv(1))'
        status, text = run(f"{sys.executable} -c 'import socket; {call}; {call}'", ports=str(port))
    assert status == 0 and text.count("b''") == 2, text


@pytest.mark.parametrize(("command", "status"), [("exit 3", 3), ("kill -9 $$", 137), ("sleep 99 & exit 4", 4)])
@pytest.mark.parametrize("ports", ["all", "9"])
def test_the_status_is_the_commands(run, command, status, ports):
    if ports != "all":
        require_namespaces(run)
    assert run(f"sh -c '{command}'; exit $?", ports=ports)[0] == status
