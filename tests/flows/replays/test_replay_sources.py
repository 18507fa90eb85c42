"""Replays whose source was removed: at work, to go on, and finished. The removals are real; weights are played."""

from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from configs.errors import ConfigError
from flows.cli.run import resume
from flows.cli.run import run_replays as launched
from flows.replay import replay
from flows.replays import config as replay_config
from flows.replays import loop as walks
from flows.replays.request import ReplayRequest
from flows.runtime import maintenance as gc
from flows.runtime.session import record_run
from storage.errors import WorkRemoved
from storage.policies.store import Policies
from storage.store import open_store
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Ref
from tests.fixtures.rehearsal import SOURCE, Rehearsal, rehearse, session_for
from tests.fixtures.replays import RLOO, ask, walk

pytestmark = pytest.mark.engine


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a run of two steps that finished long enough ago."""
    monkeypatch.setattr("storage.maintenance.plan.RECENT_HOURS", 0.0)
    monkeypatch.setattr(Policies, "directory", lambda self, key, verify=False: tmp_path)
    monkeypatch.setattr(replay_config, "config_versions", lambda config: {})
    rehearse(tmp_path / "store", "base")
    return tmp_path / "store"


def remove(root: Path, force: bool = False) -> None:
    """Remove the recorded run."""
    store = open_store(root)
    named = ["base"]
    gc.remove_planned(store, gc.choose_removal(store, (), 0, () if force else named, named if force else (), "all"))
    assert store.runs.events("base")[-1].event == "removed"


def dying(root: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> WorkRemoved:
    """Go through a replay whose source is removed when its step 1 comes to a stage; return what it ends with."""

    class Removing(Rehearsal):
        def __call__(self, task: StageTask, step: int, *arguments: Any, **named: Any) -> Ref:
            if (task.stage.name, step) == (last, 1):
                remove(root, force=True)
            return super().__call__(task, step, *arguments, **named)

    monkeypatch.setattr(walks, "Executor", Removing)
    config = ask(root, overrides=[RLOO], name="kept")
    session = session_for(root, "kept")
    session.context.config, session.source = config, SOURCE
    with pytest.raises(WorkRemoved) as caught, record_run(session):
        walks.loop_replay(session)
    return caught.value


@pytest.mark.parametrize("last", ["advantage", "packing"])
def test_a_replay_that_loses_its_source_says_what_can_still_be_done(
    root: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    error = dying(root, monkeypatch, last)
    assert "run 'base' was removed from the store while it was replayed" in str(error)
    assert "This replay cannot go on" in error.do and "the same again" not in str(error)
    assert f"stagecoach replay kept --store {root}" in error.do
    assert not getattr(error, "__notes__", [])
    with pytest.raises(ConfigError, match=r"its steps are gone\. This replay cannot go on\. Look at what it finished"):
        ask(root, run="", until="", name="kept")


def test_another_trouble_of_the_store_is_passed_on_as_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = WorkRemoved("other work was removed", do="run the same again")

    class Troubled(Rehearsal):
        def __call__(self, task: StageTask, *arguments: Any, **named: Any) -> Ref:
            raise trouble

    monkeypatch.setattr(walks, "Executor", Troubled)
    session = session_for(root, "kept")
    session.context.config = ask(root, overrides=[RLOO], name="kept")
    with pytest.raises(WorkRemoved) as caught:
        walks.loop_replay(session)
    assert caught.value is trouble


def test_a_finished_replay_is_told_to_be_finished_without_its_source(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walk(ask(root, overrides=[RLOO], name="kept"))
    remove(root)
    before = len(open_store(root).runs.events("kept"))
    assert resume("kept", store=str(root)) == 0
    assert "replay 'kept' is finished: nothing is left to do" in capsys.readouterr().out
    assert launched([ReplayRequest(run="base", name="kept", store=str(root), until="packing")]) == 0
    with disable_run_logger():  # which only flow runs have
        assert replay.fn("base", name="kept", advanced={"store": str(root)})["steps"] == []
    assert len(open_store(root).runs.events("kept")) == before


@pytest.mark.parametrize("other", [{"overrides": ["algorithm.type=grpo"]}, {"from_stage": "packing"}, {"steps": "1"}])
def test_what_a_finished_replay_did_not_do_is_refused_without_its_source(root: Path, other: dict[str, Any]) -> None:
    walk(ask(root, overrides=[RLOO], name="kept"))
    remove(root)
    with pytest.raises(ConfigError, match="run 'base' was removed"):
        launched([ReplayRequest(**{"run": "", "name": "kept", "store": str(root)} | other)])
