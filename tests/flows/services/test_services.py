"""The supervisor with real processes: side by side, watched, restarted, hanging, gone at the end."""

import os
import re
import signal
import sys
import tempfile
import threading
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from configs.run import RunConfig
from flows.cli import explanation
from flows.services import base, process
from flows.services.base import (
    RunService,
    Supervisor,
    ready_reports,
)
from flows.services.ownership import identity, owned_processes, start_time
from flows.services.process import ServiceFailed, ServiceSpec
from tests.fixtures.faults import happened
from tests.fixtures.programs import SERVICE
from tests.fixtures.waiting import PATIENCE, until

pytestmark = [pytest.mark.engine, pytest.mark.essential]

SECRET = "sk-very-secret-0123"


def spec(directory, name="engine", program="polite", **changes):
    """A service that runs one of the test programs. One that will not go is not waited for when it is told to."""
    report = directory / f"{name}.json"
    arguments = changes.pop("arguments", ())
    values = {
        "name": name,
        "argv": [sys.executable, SERVICE, program, str(report), *arguments],
        "env": {"DEMO_API_KEY": SECRET},
        "report": report,
        "log": directory / f"{name}.log",
        "ready": lambda _: True,
        "startup_seconds": PATIENCE,
        "max_restarts": 1,
        "grace_seconds": 0.5 if program == "stubborn" else PATIENCE,
    }
    return ServiceSpec(**{**values, **changes})


@pytest.fixture
def supervisor(tmp_path):
    with Supervisor("run", tmp_path / "services") as supervisor:
        yield supervisor
    assert owned_processes(identity()) == []


@pytest.fixture
def start(supervisor, tmp_path):
    """Start a service that runs one of the test programs."""
    return lambda *names, **changes: supervisor.start(spec(tmp_path, *names, **changes))


def await_end(handle, generation=1):
    """Wait until the watcher has seen the end of a generation."""
    with handle._changed:
        handle._changed.wait_for(lambda: handle._failure or handle.generation > generation, PATIENCE)


def killed(handle):
    """Kill a service that is ready; return its process id once its watcher has seen the end."""
    pid = handle.wait()["pid"]
    generation = handle.generation
    os.kill(pid, signal.SIGKILL)
    await_end(handle, generation)
    return pid


def failure(handle):
    """Return how a service fails that is waited for."""
    with pytest.raises(ServiceFailed) as caught:
        handle.wait()
    return str(caught.value)


def test_a_service_starts_reports_and_ends(tmp_path):
    with Supervisor("run", tmp_path) as supervisor:
        handle = supervisor.start(spec(tmp_path))
        assert handle.wait()["pid"] in owned_processes(identity())
        assert (handle.generation, handle.alive) == (1, True)
        assert len(owned_processes(identity())) == 2
    assert owned_processes(identity()) == []
    assert not handle.alive
    assert (tmp_path / "engine.json.ended").exists()


def test_starts_are_side_by_side(start, tmp_path):
    ready = Mock(side_effect=lambda _: (tmp_path / "second.json").exists())
    first = start("first", ready=ready)
    second = start("second", ready=lambda _: (tmp_path / "first.json").exists())
    first.wait()
    second.wait()
    assert ready.called


@pytest.mark.fault("services", "a service is killed twice", "it is started again once, then its failure is named")
def test_a_killed_service_comes_back_with_a_fresh_report_until_no_restart_is_left(start):
    handle = start()
    first = killed(handle)
    assert start_time(first) is None
    second = killed(handle)
    happened(f"SIGKILL to {first} and {second}")
    assert second != first
    assert "killed by signal 9 in generation 2: no restart of 1 is left" in failure(handle)
    assert not handle.alive


class OneProcess(RunService):
    """A kind of service with one process, a test program."""

    def begin(self):
        self._process("engine", self._spec)

    def _spec(self):
        def command(report):
            return [sys.executable, SERVICE, "polite", str(report)], {}

        return self._describe("engine", command, ready=lambda report: start_time(report["pid"]) is not None)


@pytest.mark.fault("two writers", "two processes start the services of one run", "each knows its own alone")
def test_what_services_report_is_private_to_who_started_them(tmp_path):
    with Supervisor("run", tmp_path) as first, Supervisor("run", tmp_path) as second:
        handles = []
        for supervisor in (first, second):
            service = OneProcess(supervisor, RunConfig())
            service.begin()
            handles += service.handles
        pids = [handle.wait()["pid"] for handle in handles]
        happened(f"processes {pids}")
        assert len({*pids}) == 2
        second.close()
        assert handles[0].read_report() == {"pid": pids[0]} and handles[0].alive
        assert handles[0].spec.log == handles[1].spec.log, "one file has both"
    assert not list((tmp_path / "reports").iterdir())


@pytest.fixture
def watchful(supervisor, monkeypatch):
    """A supervisor that asks often whether a service hangs."""
    monkeypatch.setattr(process, "ASK_SECONDS", 0.1)
    return supervisor


@pytest.fixture
def told(supervisor):
    """What a run is told of its services."""
    told = []
    with supervisor.subscribe(lambda event, text="", **_: told.append(text) if text else None):
        yield told


@pytest.mark.fault("services", "a service is killed three times", "each loss is told with the restart that follows")
def test_every_loss_is_told_with_its_end_and_the_restart_that_follows(start, tmp_path, told):
    log = tmp_path / "engine.log"
    handle = start(max_restarts=2)
    for _ in range(3):
        killed(handle)
    until(lambda: len(told) == 3, lambda: f"{told}")
    happened(told[0])
    ends = ("restart 1 of 2", "restart 2 of 2", "it is not started again")
    assert told == [f"engine: was killed by signal 9; {end}; log: {log}" for end in ends]


def test_of_several_of_a_kind_those_that_answer_are_enough_and_the_last_that_fails_is_all(start, told):
    refused = start("first", arguments=("3",))
    other = start("second", max_restarts=0)
    assert ready_reports([refused, other]) == [other.report]
    until(lambda: told, lambda: "no loss")
    assert told[0].startswith("first: ended with status 3; it is not started again")
    os.kill(other.report["pid"], signal.SIGKILL)
    until(lambda: len(told) == 2, lambda: f"{told}")
    with pytest.raises(ServiceFailed, match=r"service '(first|second)' (ended with status 3|was killed by signal 9)"):
        ready_reports([refused, other])


def test_of_several_of_a_kind_the_first_that_answers_is_taken_and_the_others_are_waited_for(start):
    may_answer = threading.Event()
    slow = start("slow", ready=lambda _: may_answer.is_set())
    quick = start("quick")
    assert ready_reports([slow, quick]) == [quick.report]
    may_answer.set()
    until(lambda: slow.report, lambda: "nobody has seen that it is ready")
    assert ready_reports([slow, quick]) == [slow.report, quick.report]


@pytest.mark.fault("services", "a service exits, another hangs", "each is told with how it ended")
def test_an_exit_and_a_hang_are_told_as_such_and_an_end_that_was_asked_for_is_not(watchful, start, tmp_path, told):
    start("first", arguments=("3",), max_restarts=5)
    start("second", hangs=Mock(side_effect=chain([True], repeat(False)))).wait()
    until(lambda: len(told) == 2, lambda: f"{told}")
    happened(told)
    assert sorted(told) == [
        f"first: ended with status 3; it is not started again; log: {tmp_path / 'first.log'}",
        f"second: did not answer any more and was ended; restart 1 of 1; log: {tmp_path / 'second.log'}",
    ]
    watchful.close()
    assert len(told) == 2


def test_who_waits_for_a_slow_service_is_told_of_it_once_in_a_while(start, tmp_path, told, monkeypatch):
    monkeypatch.setattr(process, "SLOW_SECONDS", 0.2)
    handle = start(ready=lambda _: len(told) > 1)
    handle.wait()
    assert len(told) == 2
    assert all(re.fullmatch(rf"engine: still starting, \d+ s; log: {tmp_path}/engine.log", news) for news in told)


@pytest.mark.fault("services", "a service's guardian is killed", "no orphan, and the service is started again")
def test_a_killed_guardian_leaves_nothing_and_counts_as_a_restart(start, tmp_path):
    handle = start(program="stubborn")
    handle.wait()
    orphan = int((tmp_path / "engine.json.orphan").read_text())
    os.kill(handle._process.pid, signal.SIGKILL)
    happened(f"SIGKILL to {handle._process.pid}")
    await_end(handle)
    assert handle.generation == 2
    assert start_time(orphan) is None
    handle.wait()
    assert len(owned_processes(identity())) == 3


def test_a_service_that_changes_its_title_keeps_its_mark(start):
    pytest.importorskip("setproctitle")
    handle = start(program="titled")
    pid = handle.wait()["pid"]
    assert b"Engine::Core" in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert pid in owned_processes(identity())


@pytest.mark.fault(
    "services", "a service ends before it is ready", "its failure with the end of its log, secrets masked"
)
def test_a_service_that_cannot_start_fails_at_once_with_the_end_of_its_log(start, tmp_path):
    handle = start(arguments=("3",), max_restarts=5)
    message = failure(handle)
    happened(message)
    ended = "service 'engine' ended with status 3 before it was ready"
    for words in (ended, "  | no such model", str(tmp_path / "engine.log"), "is safe", "key *** starts"):
        assert words in message
    assert SECRET not in message
    assert handle.generation == 1


def test_the_cause_is_in_the_message_however_much_was_printed_after_it(start):
    program = "print('MemoryError: of a worker', *['  File noise'] * 40, 'RuntimeError: see above', sep='\\n'); exit(3)"
    message = failure(start(argv=[sys.executable, "-c", program]))
    assert "log, whose first error is\n  | MemoryError: of a worker\nand which ends" in message


@pytest.mark.fault("services", "a service may have 64 MiB", "its failure with the limits to raise")
def test_a_service_that_gets_no_memory_says_which_limits_to_raise(start):
    program = "import resource as r; r.setrlimit(r.RLIMIT_DATA, (2**26, 2**26)); bytearray(2**30)"
    with pytest.raises(ServiceFailed) as ended:
        start(argv=[sys.executable, "-c", program]).wait()
    happened(ended.value)
    said = str(explanation(ended.value))
    assert said.startswith("memory or threads are short: service 'engine' ended") and "ulimit -v, -d" in said


@pytest.mark.fault("services", "a service never gets ready", "its failure with its last answer")
def test_a_service_that_never_gets_ready_fails_with_its_last_answer(start):
    def refuse(_):
        raise ConnectionError("not yet listening")

    handle = start(ready=refuse, startup_seconds=0.3)
    until(handle.read_report, lambda: "it has not reported, and is not asked")
    with pytest.raises(ServiceFailed, match=r"after 0\.3 s; it last said: ConnectionError: not yet") as caught:
        handle.wait()
    happened(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)


@pytest.mark.fault("services", "a service's report is half written", "it is no report")
def test_a_half_written_report_is_not_a_report(start, tmp_path):
    handle = start()
    handle.wait()
    for text in ('{"pid": 1', "[1]", ""):
        (tmp_path / "engine.json").write_text(text)
        happened(f"report {text!r}")
        assert handle.read_report() is None


def test_an_external_service_is_adopted_and_left_alone(start, tmp_path):
    url, ready = "http://127.0.0.1:1", Mock(return_value=True)
    handle = start(external=url, ready=ready)
    assert handle.wait() == {"url": url, "address": url}
    ready.assert_called_once_with({"url": url, "address": url})
    assert (handle.alive, handle.generation) == (True, 0)
    assert not (tmp_path / "engine.log").exists()


def test_an_unreachable_external_service_says_that_nothing_was_started(supervisor, tmp_path):
    away = spec(tmp_path, "away", external="http://127.0.0.1:1", ready=lambda _: False, startup_seconds=0.1)
    message = failure(supervisor.start(away))
    assert "'away' at http://127.0.0.1:1 is not ready" in message and "Nothing was started" in message


SOCKET = """
import itertools
import json, os, socket, sys, time, uuid
with socket.socket(socket.AF_UNIX) as bound:
    bound.bind(f"{os.environ['TMPDIR']}/{uuid.uuid4()}")
    with open(sys.argv[1], "w") as report:
        json.dump({"there": os.environ["TMPDIR"]}, report)
    time.sleep(600)
"""


def test_an_engine_finds_room_for_its_socket_though_tmpdir_is_long(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with Supervisor("run", tmp_path) as supervisor:
        argv = [sys.executable, "-c", SOCKET, str(tmp_path / "engine.json")]
        there = Path(supervisor.start(spec(tmp_path, argv=argv, max_restarts=0)).wait()["there"])
        assert there.is_dir() and long not in there.parents
    assert not there.exists()


@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt])
def test_an_exception_ends_the_services(tmp_path, problem):
    with pytest.raises(problem), Supervisor("run", tmp_path) as supervisor:
        supervisor.start(spec(tmp_path)).wait()
        assert owned_processes(identity()) != []
        raise problem
    assert owned_processes(identity()) == []


def test_services_end_though_a_forked_child_of_the_flow_lives(tmp_path):
    with Supervisor("run", tmp_path) as supervisor:
        supervisor.start(spec(tmp_path)).wait()
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    ended = (tmp_path / "engine.json.ended").exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ended


def test_a_secret_in_the_command_line_is_refused(start):
    with pytest.raises(AssertionError, match="a secret in the command line"):
        start(arguments=(f"--key={SECRET}",))


@pytest.mark.fault("services", "a service hangs", "it is started again, and its log says why")
def test_a_service_that_does_not_answer_is_started_again_and_its_log_says_why(watchful, start, tmp_path):
    hangs = Mock(side_effect=chain([False, True], repeat(False)))
    handle = start("server", hangs=hangs)
    first = handle.wait()
    await_end(handle)
    assert handle.generation == 2
    happened("its second answer never came")
    assert hangs.call_args_list[:2] == [call(first)] * 2, "it answered once"
    assert handle.wait() != first
    head = "--- server, generation 2: the one before did not answer any more and was ended\n"
    assert head in (tmp_path / "server.log").read_text()


def test_who_waits_for_a_service_without_an_answer_is_told(watchful, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "SLOW_SECONDS", 0.1)
    heard, may_answer = [], threading.Event()
    with watchful.subscribe(lambda event, text="", **_: heard.append(text) if event == "note" else None):
        hang = spec(tmp_path, "server", hangs=lambda _: not may_answer.wait(PATIENCE), hang_seconds=120.0)
        watchful.start(hang).wait()
        # On a busy machine its start takes longer than that too, which is said before.
        until(lambda: any("no answer" in note for note in heard), lambda: f"{heard}")
        may_answer.set()
    (note,) = {note for note in heard if "no answer" in note}
    again = "the run waits for it, and starts it again after 120 s without one"
    assert note == f"server: no answer for 0 s; {again}; log: {tmp_path / 'server.log'}"


@pytest.mark.fault("services", "a service hangs and has no restart left", "its failure with that reason")
def test_one_that_hangs_again_fails_with_that_reason(watchful, start):
    handle = start("server", hangs=lambda _: True, max_restarts=0)
    handle.wait()
    await_end(handle)
    happened("no answer came")
    assert "'server' did not answer any more and was ended in generation 1: no rest" in failure(handle)


def test_a_service_is_asked_once_it_was_ready_and_one_that_dies_meanwhile_is_started_again_once(watchful, start):
    hangs = Mock(side_effect=lambda _: handle.generation == 1 and killed(handle))
    handle = start("server", hangs=hangs)
    assert handle.report == {}
    first = handle.wait()
    until(lambda: handle.ready_now() and hangs.call_count > 1, lambda: handle._failure)
    assert handle.alive and handle.generation == 2 and hangs.call_args_list[0] == call(first)


@pytest.mark.fault(
    "services", "the system refuses to start a service again", "its failure with the system's words, no descriptor lost"
)
def test_one_that_cannot_be_started_again_fails_at_once_and_says_what_the_system_said(watchful, start, monkeypatch):
    handle = start("server", hangs=lambda _: "TOO_LONG" in os.environ)
    handle.wait()
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setenv("TOO_LONG", "x" * 200_000)  # for the system, which refuses to start anything with it
    await_end(handle)
    happened("an environment of 200,000 characters")
    message = failure(handle)
    assert "did not answer any more and was ended and cannot be started again: " in message and " too long" in message
    assert (handle.alive, handle.generation) == (False, 1)
    # Other threads of this process open and close some meanwhile, as the one that reads the log.
    until(lambda: len(os.listdir("/proc/self/fd")) < descriptors, lambda: f"{descriptors} before")


@pytest.mark.fault("services", "a service floods its log", "the log stays within its share, whole lines")
def test_a_flood_fills_no_more_than_its_share_of_the_disk(watchful, start, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "LOG_BYTES", 140_000)
    flood = "import sys\nfor number in range(10**9): sys.stdout.write(f'line {number:09}\\n'), sys.stdout.flush()"
    argv = [sys.executable, "-c", flood]
    handle = start("server", argv=argv)
    log, aside = tmp_path / "server.log", tmp_path / "server.log.1"
    until(aside.exists, lambda: f"the log grew to {log.stat().st_size} bytes and was not moved aside")
    happened("the log was moved aside")
    assert handle.alive
    watchful.close()
    assert 140_000 <= aside.stat().st_size <= 2 * 140_000 + 2**20
    kept = aside.read_text().splitlines()
    numbers = [int(line.removeprefix("line ")) for line in kept[1:-1] if line.startswith("line ")]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "whole lines, in their order, none missing"
    assert log.stat().st_size <= 140_000 and log.read_bytes().count(b"\0") == 0
