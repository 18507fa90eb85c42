"""Services that live and do not answer, and those that flood their log: real processes below a real supervisor."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.services import process
from flows.services.base import Supervisor
from flows.services.ownership import identity, owned
from flows.services.process import Handle, ServiceFailed, ServiceSpec
from tests.fixtures.waiting import PATIENCE, until

pytestmark = pytest.mark.engine

POLITE = Path(__file__).parents[1] / "programs" / "polite.py"


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(process, "ASK_SECONDS", 0.1)
    with Supervisor("run", tmp_path / "services") as supervisor:
        yield supervisor
    assert owned(identity()) == []


def spec(directory: Path, **changes: Any) -> ServiceSpec:
    report = directory / "server.json"
    values: dict[str, Any] = {
        "name": "server",
        "argv": [sys.executable, str(POLITE), str(report)],
        "env": {},
        "report": report,
        "log": directory / "server.log",
        "ready": lambda _: True,
        "startup_seconds": PATIENCE,
        "max_restarts": 1,
        "grace_seconds": 0.5,
    }
    return ServiceSpec(**{**values, **changes})


def until_generation(handle: Handle, generation: int) -> None:
    """Wait for the watcher to start a generation."""
    with handle._changed:
        assert handle._changed.wait_for(lambda: handle.generation == generation or handle._failure, PATIENCE)


def test_a_service_that_does_not_answer_is_started_again_and_its_log_says_why(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def hangs(report: dict[str, Any]) -> bool:
        asked.append(report)
        return len(asked) == 2

    handle = supervisor.start(spec(tmp_path, hangs=hangs))
    first = handle.wait()
    until_generation(handle, 2)
    assert asked[:2] == [first, first], "it answered once"
    assert handle.wait() != first
    head = "--- server, generation 2: the one before did not answer any more and was ended\n"
    assert head in (tmp_path / "server.log").read_text()


def test_one_that_hangs_again_fails_with_that_reason(supervisor: Supervisor, tmp_path: Path) -> None:
    handle = supervisor.start(spec(tmp_path, hangs=lambda _: True, max_restarts=0))
    handle.wait()
    with handle._changed:
        assert handle._changed.wait_for(lambda: handle._failure, PATIENCE)
    with pytest.raises(ServiceFailed, match="'server' did not answer any more and was ended in generation 1: no rest"):
        handle.wait()


def test_a_service_is_not_asked_before_it_was_ready(supervisor: Supervisor, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    handle = supervisor.start(spec(tmp_path, hangs=lambda report: bool(asked.append(report))))
    assert handle.ready_report() is None
    report = handle.wait()
    assert handle.ready_report() == (1, report)
    handle.restart("was told to", generation=2)  # which is not the present one
    assert handle.alive and handle.generation == 1


def test_one_that_cannot_be_started_again_fails_at_once_and_says_what_the_system_said(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = supervisor.start(spec(tmp_path))
    handle.wait()
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setenv("TOO_LONG", "x" * 200_000)  # for the system, which refuses to start anything with it
    handle.restart("was told to end")
    with handle._changed:
        assert handle._changed.wait_for(lambda: handle._failure, PATIENCE)
    with pytest.raises(ServiceFailed, match=r"'server' was told to end and cannot be started again: .* too long"):
        handle.wait()
    assert (handle.alive, handle.generation) == (False, 1)
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_a_flood_fills_no_more_than_its_share_of_the_disk(supervisor: Supervisor, tmp_path: Path) -> None:
    flood = "import sys\nfor number in range(10**9): sys.stdout.write(f'line {number:09}\\n'), sys.stdout.flush()"
    argv = [sys.executable, "-c", flood]
    handle = supervisor.start(spec(tmp_path, argv=argv, report=None, log_bytes=140_000))
    log, aside = tmp_path / "server.log", tmp_path / "server.log.1"
    until(aside.exists, lambda: f"the log grew to {log.stat().st_size} bytes and was not moved aside")
    assert handle.alive
    supervisor.close()
    assert 140_000 <= aside.stat().st_size <= 2 * 140_000 + 2**20
    kept = aside.read_text().splitlines()
    numbers = [int(line.removeprefix("line ")) for line in kept[1:-1] if line.startswith("line ")]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "whole lines, in their order, none missing"
    assert log.stat().st_size <= 140_000 and log.read_bytes().count(b"\0") == 0
