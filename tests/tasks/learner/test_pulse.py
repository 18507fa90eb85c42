"""The learner's pulse: what counts as standing still, and what is taken for a hang by who asks."""

import socket
import threading
from contextlib import contextmanager

import pytest

from tasks.learner import pulse
from tasks.learner.pulse import LONGEST_TICK, Pulse, ask, hangs


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self):
        return self.now


def ticking(pulse, clock, ticks, seconds=1.0):
    """Let time pass and return for how long the pulse has stood still then."""
    for _ in range(ticks):
        clock.now += seconds
        pulse.tick()
    return float(pulse.status()["still_seconds"])


def test_only_a_request_that_does_not_move_stands_still():
    clock = Clock()
    heart = Pulse(clock)
    assert ticking(heart, clock, 100) == 0.0, "idle, however long"
    with heart.track("train"):
        assert ticking(heart, clock, 3) == 3.0
        assert heart.status()["request"] == "train"
        heart.beat()
        assert ticking(heart, clock, 2) == 2.0, "each beat begins anew, however long the request"
    assert heart.status() == {"request": "", "still_seconds": 0.0}


def test_a_process_that_did_not_run_was_not_stuck():
    clock = Clock()
    heart = Pulse(clock)
    with heart.track("train"):
        assert ticking(heart, clock, 1, seconds=3600.0) == LONGEST_TICK
        heart.beat()
        assert ticking(heart, clock, 10, seconds=60.0) == 10 * LONGEST_TICK, "one look at the clock in each minute"


def test_a_request_that_fails_is_over():
    clock = Clock()
    heart = Pulse(clock)
    with pytest.raises(ValueError, match="failed"), heart.track("load"):
        raise ValueError("failed")
    assert ticking(heart, clock, 10) == 0.0


@contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        yield listener, f"{host}:{port}"


def test_who_asks_is_told_while_the_work_goes_on():
    clock = Clock()
    heart = Pulse(clock)
    with listening() as (listener, address):
        heart.serve(listener)
        assert ask(address, 30.0) == {"request": "", "still_seconds": 0.0}
        with heart.track("train"):
            clock.now += LONGEST_TICK
            assert ask(address, 30.0) == {"request": "train", "still_seconds": LONGEST_TICK}
            assert not hangs(address, LONGEST_TICK) and hangs(address, LONGEST_TICK - 0.5)
            heart.beat()
            assert not hangs(address, LONGEST_TICK - 0.5)
        clock.now += LONGEST_TICK
        assert not hangs(address, LONGEST_TICK - 0.5), "nothing is under way"


def test_who_has_no_key_is_told_nothing_and_keeps_nobody_waiting():
    with listening() as (listener, address):
        Pulse().serve(listener, "k")
        host, port = listener.getsockname()
        with socket.create_connection((host, port)):  # says nothing
            assert ask(address, 30.0, "k") == {"request": "", "still_seconds": 0.0}
        with pytest.raises(ConnectionRefusedError, match="another key"):
            ask(address, 30.0, "j")
        with pytest.raises(ValueError, match=r"utf-8|utf-16|utf-32|Expecting value"):
            ask(address, 30.0)
        assert not hangs(address, 30.0, "j"), "nobody can tell"


def test_one_that_takes_questions_and_never_answers_hangs(caplog):
    with listening() as (_, address):  # the system accepts for whoever is stopped
        assert hangs(address, 0.05)
    assert "has not answered for 0.05 s (learner.hang_seconds)" in caplog.text


def test_one_that_answers_the_second_time_does_not_hang(monkeypatch):
    monkeypatch.setattr(pulse, "RETRY_SECONDS", 30.0)
    asked = []
    real = pulse.ask

    def late(address, seconds, key):
        asked.append(seconds)
        if len(asked) == 1:
            raise TimeoutError
        return real(address, seconds, key)

    monkeypatch.setattr(pulse, "ask", late)
    with listening() as (listener, address):
        Pulse().serve(listener)
        assert not hangs(address, 30.0) and len(asked) == 2


def test_one_that_is_gone_does_not_hang():
    with listening() as (_, address):
        pass
    assert not hangs(address, 30.0), "nobody is there: dead, which others see"


@pytest.mark.parametrize("sent", [b"", b"220 ready\r\n"])
def test_one_that_says_nothing_or_has_the_port_of_one_that_is_gone_does_not_hang(sent):
    def answer(listener):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(sent)

    with listening() as (listener, address):
        answering = threading.Thread(target=answer, args=(listener,))
        answering.start()
        assert not hangs(address, 30.0)
        answering.join()
