"""What gc leaves of a run that replays went through: whatever a kept replay needs to go on or to be replayed."""

from pathlib import Path

import pytest

from flows.queries.step_history import step_history
from flows.replays import config as replay_config
from flows.runtime import maintenance as gc
from storage.errors import StoreError
from storage.policies.store import Policies
from storage.store import Store, open_store
from tests.fixtures.rehearsal import rehearse
from tests.fixtures.replays import RLOO, ask, walk

pytestmark = pytest.mark.engine


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a run of three steps that finished long enough ago."""
    monkeypatch.setattr("storage.maintenance.plan.RECENT_HOURS", 0.0)
    monkeypatch.setattr(Policies, "directory", lambda self, key, verify=False: tmp_path)  # weights are played
    monkeypatch.setattr(replay_config, "config_versions", lambda config: {})
    rehearse(tmp_path / "store", "base", steps=3)
    return tmp_path / "store"


def remove(root: Path) -> Store:
    """Remove the recorded run."""
    store = open_store(root)
    gc.remove_planned(store, gc.choose_removal(store, (), 0, ["base"], (), "all"))
    assert store.runs.events("base")[-1].event == "removed"
    return open_store(root)


@pytest.mark.parametrize("begin", ["rollout", "filtering"])
def test_a_replay_up_to_packing_can_still_be_trained_from_the_same_policies(root: Path, begin: str) -> None:
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


def test_what_an_unfinished_replay_goes_through_is_not_removed_unless_it_is_forced(root: Path) -> None:
    config = ask(root, overrides=[RLOO], name="kept")
    walk(config)
    store = open_store(root)
    store.runs.record(run="kept", event="resumed")
    with pytest.raises(StoreError, match=r"base .run 'kept', which may go on, replays it."):
        gc.choose_removal(store, (), 0, ["base"], (), "all")
    assert gc.choose_removal(store, ["kept"], 0, (), (), "all").removed == ()
    assert gc.choose_removal(store, (), 0, (), ["base"], "all").removed == ("base",)
