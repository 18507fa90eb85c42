"""Replays and the removal of the run that they replay: what gc leaves of it, and what a replay can still do without.

The removals are real; weights are played.
"""

import pytest

from configs.errors import ConfigError
from flows.cli.run import run_replay as launched
from flows.queries.step_history import step_history
from flows.replays import config as replay_config
from flows.replays import loop
from flows.replays.request import ReplayRequest
from flows.runtime import maintenance as gc
from flows.runtime.session import record_run
from storage.errors import StoreError
from storage.policies.store import Policies
from storage.store import open_store
from tests.fixtures.rehearsal import SOURCE, Rehearsal, rehearse, session_for
from tests.fixtures.replays import RLOO, ask, walk

pytestmark = pytest.mark.engine


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A store with a run of three steps that finished long enough ago."""
    monkeypatch.setattr("storage.maintenance.plan.RECENT_HOURS", 0.0)
    monkeypatch.setattr(Policies, "directory", lambda self, key, verify=False: tmp_path)
    monkeypatch.setattr(replay_config, "config_versions", lambda config: {})
    rehearse(tmp_path / "store", "base", steps=3)
    return tmp_path / "store"


def remove(root, force=False):
    """Remove the recorded run."""
    store = open_store(root)
    named, forced = ([], ["base"]) if force else (["base"], [])
    gc.remove_planned(store, gc.choose_removal(store, (), 0, named, forced, "all"))
    assert store.runs.events("base")[-1].event == "removed"
    return open_store(root)


@pytest.mark.parametrize("begin", ["rollout", "filtering"])
def test_a_replay_up_to_packing_can_still_be_trained_from_the_same_policies(root, begin):
    walk(
        ask(root, from_stage=begin, overrides=["rollout.temperature=0.5" if begin == "rollout" else RLOO], name="kept")
    )
    before = [past.policy for past in step_history(open_store(root), "kept").steps.values()]
    keys = [policy.key for policy in before if policy]
    assert len({*keys}) == 3, "each step started from another policy"
    store = remove(root)
    assert {entry.key for entry in store.ledger.entries(run="base")} >= {*keys}
    assert gc.choose_removal(store, (), 0, (), (), "last").rows == ()
    later = gc.choose_removal(store, ["kept"], 0, (), (), "last")
    assert not {entry.key for entry in later.rows} & {*keys}


def test_what_an_unfinished_replay_goes_through_is_not_removed_unless_it_is_forced(root):
    walk(ask(root, overrides=[RLOO], name="kept"))
    store = open_store(root)
    store.runs.record(run="kept", event="resumed")
    with pytest.raises(StoreError, match=r"base .run 'kept', which may go on, needs it."):
        gc.choose_removal(store, (), 0, ["base"], (), "all")
    assert gc.choose_removal(store, ["kept"], 0, (), (), "all").removed == ()
    assert gc.choose_removal(store, (), 0, (), ["base"], "all").removed == ("base",)
    remove(root, force=True)
    with pytest.raises(ConfigError, match=r"its steps are gone\. This replay cannot go on\. Look at what it finished"):
        ask(root, run="", until="", name="kept")


@pytest.mark.parametrize("last", ["advantage", "packing"])
def test_a_replay_that_loses_its_source_says_what_can_still_be_done(root, monkeypatch, last):
    class Removing(Rehearsal):
        def __call__(self, task, step, *arguments, **named):
            if (task.stage.name, step) == (last, 1):
                remove(root, force=True)
            return super().__call__(task, step, *arguments, **named)

    monkeypatch.setattr(loop, "Executor", Removing)
    config = ask(root, overrides=[RLOO], name="kept")
    session = session_for(root, "kept")
    session.config = session.context.config = config
    session.source = SOURCE
    with pytest.raises(ConfigError, match=r"its steps are gone\. This replay cannot go on"), record_run(session):
        loop.loop_replay(session)


def test_a_finished_replay_keeps_its_rows_without_its_source(root):
    walk(ask(root, overrides=[RLOO], name="kept"))
    remove(root)
    with pytest.raises(ConfigError, match=r"run 'base' was removed.*Look at what it finished"):
        launched(ReplayRequest(run="", name="kept", store=str(root)))
    steps = step_history(open_store(root), "kept").steps
    assert sum(open_store(root).read(past.work["packing"].slices_of("batches")).num_rows for past in steps.values()) > 0
