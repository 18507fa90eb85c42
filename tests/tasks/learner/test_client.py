"""The wire and the client against a scripted other end: no torch, no process."""

import socket
import struct
import subprocess
import sys
import threading

import pyarrow as pa
import pytest

from tasks.learner import protocol
from tasks.learner.client import Learner
from tasks.learner.protocol import LearnerError, LearnerLost, NoOptimizerState
from tests.fixtures.waiting import PATIENCE

TABLE = pa.table({"tokens": pa.array([[1, 2], []], pa.list_(pa.int32()))})


@pytest.fixture
def server():
    """Serve one connection with a given function; return the address."""
    listeners, threads = [], []

    def start(behave):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run():
            connection, _ = listener.accept()
            with connection:
                behave(connection)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for thread in threads:
        thread.join(60)
    for listener in listeners:
        listener.close()


def test_messages_come_back_as_they_went():
    left, right = socket.socketpair()
    with left, right:
        for table in (None, TABLE, TABLE.slice(0, 0)):
            protocol.send(left, {"request": "ü", "value": None}, table)
            header, received = protocol.receive(right)
            assert header == {"request": "ü", "value": None}
            assert (received is None) == (table is None)
            assert table is None or received.equals(table)


def test_the_answer_of_a_step_of_thousands_of_updates_comes_through():
    updates = [{f"measure {number}": number / 7 for number in range(40)}] * 4000
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=protocol.send, args=(left, {"updates": updates}))
        sender.start()
        assert protocol.receive(right)[0]["updates"] == updates
        sender.join(PATIENCE)


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (struct.pack("!IQ", 10, 0) + b"{}", EOFError, "2 of 10"),
        (b"\xff" * 12, ValueError, "none of ours"),  # refused before memory is taken for it
    ],
)
def test_a_message_cut_off_and_what_is_none_are_errors(sent, error, words):
    left, right = socket.socketpair()
    with right:
        left.sendall(sent)
        left.close()
        with pytest.raises(error, match=words):
            protocol.receive(right)


def test_request_and_answer(server):
    seen = []

    def behave(connection):
        seen.append(protocol.receive(connection))
        protocol.send(connection, {"result": [{"loss": 1.0}]}, TABLE)

    names = {"policy_key_in": "a", "policy_key_out": "b", "directory_out": "d", "state_directory": "s"}
    given = {"step": 3, "save_optimizer": False, **names}
    with Learner(server(behave)) as learner:
        updates, statistics = learner.train(TABLE, **given)
    assert (updates, statistics.equals(TABLE)) == ([{"loss": 1.0}], True)
    ((header, table),) = seen
    assert header == {"request": "train", "arguments": given} and table.equals(TABLE)


@pytest.mark.parametrize(
    ("name", "kind"), [("LearnerError", LearnerError), ("NoOptimizerState", NoOptimizerState), ("new", LearnerError)]
)
def test_the_worker_s_error_comes_back_with_its_message(server, name, kind):
    def behave(connection):
        protocol.receive(connection)
        protocol.send(connection, {"error": name, "message": "what, where, what to do"})

    with Learner(server(behave)) as learner, pytest.raises(kind, match="what, where, what to do") as caught:
        learner.state()
    assert type(caught.value) is kind


def test_a_connection_that_ends_before_the_answer_is_a_lost_learner(server):
    learner = Learner(server(protocol.receive))
    with pytest.raises(LearnerLost, match="during 'probe'"):
        learner.probe([1, 2])
    with pytest.raises(LearnerLost):
        learner.state()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(LearnerLost, match=address):
        Learner(address)


def test_the_client_and_what_starts_the_worker_import_no_torch():
    code = "import sys, tasks.learner.client, tasks.learner.digest, tasks.learner.tiny\n"
    code += "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert found.stdout.strip() == "[]"
