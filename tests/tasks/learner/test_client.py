"""The wire and the client against a scripted other end: no torch, no process."""

import socket
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from storage.errors import DamagedSlice
from storage.refs import File, Slice
from tasks.learner import protocol
from tasks.learner.client import Learner
from tasks.learner.protocol import BatchReference, LearnerError, LearnerLost, NoOptimizerState
from tests.fixtures.waiting import PATIENCE

PIECE = Slice("batches", "a", "attempt", 2, "d" * 64, (File("run=a/x.parquet", 7, "e" * 64),))
BATCH = BatchReference("s3://bucket/store", (PIECE, PIECE), (PIECE,))


@pytest.fixture
def server():
    """Serve one connection with a given function; return the address."""
    with ExitStack() as ending:

        def start(behave):
            listener = ending.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run():
                connection, _ = listener.accept()
                with connection:
                    behave(connection)

            thread = threading.Thread(target=run)
            thread.start()
            ending.callback(thread.join, PATIENCE)
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield start


def replying(answer):
    """Behave as a learner that gives one answer."""

    def behave(connection):
        protocol.receive(connection)
        protocol.send(connection, answer)

    return behave


def admit_with(key, told):
    """Behave as a learner with a key, and note who is refused."""

    def behave(connection):
        try:
            protocol.admit(connection, key)
            protocol.receive(connection)
            protocol.send(connection, {"result": {"pid": 1}})
        except (ValueError, EOFError) as refusal:
            told.append(str(refusal))

    return behave


def test_a_learner_with_a_key_answers_who_has_it(server):
    told = []
    with Learner(server(admit_with("k", told)), "k") as learner:
        assert learner.state() == {"pid": 1}
    with pytest.raises(LearnerLost, match="it has another key"):
        Learner(server(admit_with("k", told)), "j")
    assert told == ["a client without this learner's key"]


def test_a_client_with_a_key_talks_to_no_other_program(server):
    def sends_it_back(connection):
        connection.sendall(bytes(protocol.NONCE))
        sent = bytes(protocol._read(connection, 2 * protocol.NONCE))
        connection.sendall(sent[protocol.NONCE :])

    with pytest.raises(LearnerLost, match="has not this run's key"):
        Learner(server(sends_it_back), "k")


def test_the_answer_of_a_step_of_thousands_of_updates_comes_through():
    updates = [{f"measure {number}": number / 7 for number in range(40)}] * 4000
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=protocol.send, args=(left, {"updates": updates}))
        sender.start()
        assert protocol.receive(right)["updates"] == updates
        sender.join(PATIENCE)


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (struct.pack("!I", 10) + b"{}", EOFError, "2 of 10"),
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
        protocol.send(connection, {"result": [{"loss": 1.0}]})

    names = {"policy_key_in": "a", "policy_key_out": "b", "directory_out": "d", "state_directory": "s"}
    given = {"step": 3, "save_optimizer": False, **names}
    with Learner(server(behave)) as learner:
        assert learner.train(BATCH, **given) == [{"loss": 1.0}]
    (message,) = seen
    assert BatchReference.from_json(message["arguments"].pop("batch")) == BATCH
    assert message == {"request": "train", "arguments": given}


@pytest.mark.parametrize(
    ("name", "kind"), [("LearnerError", LearnerError), ("NoOptimizerState", NoOptimizerState), ("new", LearnerError)]
)
def test_the_worker_s_error_comes_back_with_its_message(server, name, kind):
    address = server(replying({"error": name, "message": ["what, where, what to do"]}))
    with Learner(address) as learner, pytest.raises(kind, match="what, where, what to do") as caught:
        learner.state()
    assert type(caught.value) is kind


def test_what_the_store_refuses_comes_back_with_all_its_parts(server):
    error = DamagedSlice("what", "where", "safe", "do")
    address = server(replying(protocol.error_answer(error)))
    with Learner(address) as learner, pytest.raises(DamagedSlice) as caught:
        learner.state()
    assert str(caught.value) == str(error) and caught.value.do == "do"


def test_the_client_and_what_starts_the_worker_import_no_torch():
    code = "import sys, tasks.learner.client, tasks.learner.digest, tasks.learner.tiny\n"
    code += "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert found.stdout.strip() == "[]"
