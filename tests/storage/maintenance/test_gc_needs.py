"""What a run needs of another though none of its rows names it: to go on, and to be trained on from."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from storage.errors import PolicyAbsent
from storage.maintenance.plan import Needs, PolicyRetention, plan_removal, why_protected
from storage.maintenance.sweep import carry_out
from tests.fixtures.histories import contents, finish, lasting, thinned, train, work

LAST = PolicyRetention()
pytestmark = pytest.mark.usefixtures("long_ago")


def train_again(store, run, policy, finished=True):
    """A run of one step that trains on from a policy of another, as a replay does."""
    store.runs.record(run=run, event="started", kind="replay", config={})
    work(store, run, f"training-{run}", 5, "training", {"policy": policy})
    if finished:
        finish(store, run)


@pytest.mark.parametrize("kind", ["all", "last"])
def test_the_way_back_to_optimizer_state_stays_with_a_policy_that_is_trained_on(store, kind):
    train(store, "a", "xxxxxx")  # every other policy has optimizer state
    train_again(store, "again", "training-xxxx")
    going = plan_removal(store, ["again"], retention=PolicyRetention.parse(kind))
    assert {entry.key for entry in going.staying} == {"training-xxxx", "rollout-xxxx", "training-xxx"}
    carry_out(store, going)
    lasting(store, ["again", "a"])
    assert len(contents(store, ["a"])) == 3
    later = plan_removal(store, ["again", "a"], retention=LAST)
    assert later.pruned == (), "what stays of a removed run is what others need"
    assert not plan_removal(store, ["again"]).rows


def test_a_policy_with_optimizer_state_is_enough(store):
    train(store, "a", "xxxx")
    train_again(store, "again", "training-xxx")
    assert [entry.key for entry in plan_removal(store, ["again"]).staying] == ["training-xxx"]


def test_what_an_unfinished_run_goes_through_again_stays_whole(store):
    train(store, "a", "xxxx")
    train(store, "b", "yy")
    train_again(store, "again", "training-x", finished=False)
    store.runs.record(run="again", event="failed", message="no luck")
    needs = {"again": Needs("b", frozenset()), "b": Needs("a", frozenset())}
    for keep in (["again"], []):
        going = plan_removal(store, keep, retention=LAST, needs=needs)
        assert (going.removed, going.pruned) == ((), ())
        assert dict(going.protected)["a"] == "run 'again', which may go on, needs it"
    kept = plan_removal(store, ["a", "b", "again"], retention=LAST, needs=needs)
    assert kept.pruned == ()
    assert plan_removal(store, ["again"], retention=LAST).removed == ("a", "b"), "without needs nothing speaks for them"
    assert plan_removal(store, ["again"], force=["a", "b"], needs=needs).removed == ("a", "b")
    assert plan_removal(store, [], force=["again"], needs=needs).removed == ("a", "b", "again")
    finish(store, "again")
    assert plan_removal(store, ["again"], needs=needs).removed == ("a", "b")


def test_runs_that_go_through_each_other_are_no_endless_way(store):
    train(store, "a", "x", finished=False)
    train(store, "b", "y", finished=False)
    needs = {"a": Needs("b", frozenset()), "b": Needs("a", frozenset())}
    assert plan_removal(store, ["a", "b"], needs=needs).empty


def test_work_that_a_kept_run_may_go_on_from_stays(store):
    train(store, "a", "xxxxx")
    train(store, "again", "y")
    needs = {"again": Needs("a", frozenset({"training-xxxx"}))}
    assert thinned(store, "a", "again") == (
        "training-xx",
        "training-xxx",
        "training-xxxx",
    )
    assert "training-xxxx" not in plan_removal(store, ["a", "again"], retention=LAST, needs=needs).pruned
    going = plan_removal(store, ["again"], needs=needs)
    assert {entry.key for entry in going.staying} == {"training-xxxx", "rollout-xxxx", "training-xxx"}
    carry_out(store, going)
    assert store.policies.directory("training-xxxx", verify=True).is_dir()
    with pytest.raises(PolicyAbsent):
        store.policies.directory("training-xxxxx")


def test_an_event_of_a_clock_that_was_ahead_protects_no_run(store, monkeypatch):
    train(store, "a", "x")
    ahead = replace(store.runs.events("a")[-1], event="lost-clock", at=datetime.now(UTC) + timedelta(days=900))
    store.runs.add_records([ahead])
    train(store, "b", "y")
    finish(store, "a")
    assert store.runs.events("b")[-1].at > ahead.at
    monkeypatch.setattr("storage.maintenance.plan.RECENT_HOURS", 1.0)
    assert why_protected(store, "b") == "it finished less than 1 h ago", "its rows in the ledger are new"
    old = datetime.now(UTC) - timedelta(hours=2)
    entries = [replace(entry, started_at=old, finished_at=old) for entry in store.ledger.entries()]
    monkeypatch.setattr(store.ledger, "entries", lambda run=None: [each for each in entries if run in (None, each.run)])
    assert [why_protected(store, run) for run in "ab"] == [None, None]
