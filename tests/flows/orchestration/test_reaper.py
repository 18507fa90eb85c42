"""Runs whose process is gone are marked as crashed; those that live, or that others must judge, are not."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.orchestration.states import mark_crashed
from flows.services.ownership import was_alive
from storage.store import Store, open_store

CONFIG = RunConfig().model_dump(mode="json")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def begin(store: Store, run: str, pid: int, host: str | None = None, event: str = "started") -> None:
    store.runs.record(run=run, event=event, kind="train", config=CONFIG, flow_run=f"flow-{run}", pid=pid, host=host)


def test_a_run_of_a_dead_process_is_marked_once(store: Store) -> None:
    gone = dead_process()
    begin(store, "dead", gone)
    begin(store, "again", gone, event="resumed")
    assert sorted(mark_crashed(store)) == ["again", "dead"]
    last = store.runs.events("dead")[-1]
    assert (last.event, last.pid, last.flow_run) == ("crashed", gone, "flow-dead")
    assert str(gone) in last.message and "safe" in last.message
    assert mark_crashed(store) == []


def test_a_living_run_an_ended_one_and_another_host_are_left_alone(store: Store) -> None:
    begin(store, "living", os.getpid())
    begin(store, "elsewhere", dead_process(), host="another")
    begin(store, "ended", dead_process())
    store.runs.record(run="ended", event="finished")
    assert mark_crashed(store) == []


def test_a_process_id_that_came_back_is_not_the_run() -> None:
    now = datetime.now(UTC)
    assert was_alive(os.getpid(), now)
    assert not was_alive(os.getpid(), now - timedelta(days=3650))
