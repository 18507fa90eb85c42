"""Records of a store: events of runs in order, one row for each finding, and a reason for every rollout in one."""

from datetime import UTC, datetime, timedelta

import pytest

from storage.errors import RunUnknown, StoreError
from storage.records import ALL_RUNS, Quarantines
from storage.store import open_store
from tests.fixtures.faults import happened


def test_events_of_a_run(store, root):
    assert (store.runs.names(), store.runs.latest()) == ([], None)
    started = store.runs.record(
        run="a", event="started", kind="train", config={"steps": 2, "rate": 0.1}, parent_run="p"
    )
    store.runs.record(run="b", event="started", kind="sft", config={}, host="elsewhere", pid=7)
    store.runs.record(run="a", event="resumed", config={"steps": 3})
    failed = store.runs.record(run="a", event="failed", step=2, message="why", flow_run="flow")
    runs = open_store(root).runs
    assert [event.event for event in runs.events("a")] == ["started", "resumed", "failed"]
    assert runs.events("a")[::2] == [started, failed]
    assert (failed.kind, failed.config, failed.parent_run, failed.step) == ("train", {"steps": 3}, "p", 2)
    assert (runs.events("b")[0].host, runs.events("b")[0].pid) == ("elsewhere", 7)
    assert (runs.config("a"), runs.names(), runs.latest()) == ({"steps": 3}, ["b", "a"], "a")


def test_a_run_that_is_not_there(store):
    store.runs.record(run="known", event="started", kind="train", config={})
    with pytest.raises(RunUnknown, match="'other'") as caught:
        store.runs.events("other")
    assert "known" in caught.value.where
    with pytest.raises(RunUnknown):
        store.runs.config("other")
    with pytest.raises(RunUnknown, match="kind and config"):
        store.runs.record(run="new", event="started")


class SetBack:
    """A clock that somebody sets back by an hour after every look."""

    def __init__(self):
        self.time = datetime(2030, 1, 1, tzinfo=UTC)

    def now(self, zone):
        self.time -= timedelta(hours=1)
        return self.time


@pytest.mark.fault("clock", "the clock is set back by an hour at each look", "events in the order of their commits")
def test_events_stay_in_the_order_of_their_commits_though_the_clock_is_set_back(store, root, monkeypatch):
    monkeypatch.setattr("storage.records.datetime", SetBack())
    store.runs.record(run="a", event="started", kind="train", config={"steps": 1})
    store.runs.record(run="b", event="started", kind="train", config={})
    open_store(root).runs.record(run="a", event="lost")
    store.runs.record(run="a", event="resumed", config={"steps": 2})
    store.runs.record(run="a", event="finished")
    happened(f"five looks at {store.runs.last_event('b')}: each an hour earlier")
    monkeypatch.undo()
    for merged in (False, True):
        if merged:
            assert store.runs.table.merge_files("a", min_files=2)
        runs = open_store(root).runs
        assert [event.event for event in runs.events("a")] == ["started", "resumed", "finished"]
        assert runs.config("a") == {"steps": 2} and runs.names() == ["b", "a"] and runs.latest() == "a"
        assert runs.events("a")[0].at < runs.lost_services("a")[0].at < runs.events("a")[1].at


def test_a_finding_is_one_row_that_every_reader_sees(store, root):
    assert store.quarantines.all() == []
    assert "quarantines" not in store.root.names("tables"), "looking makes no table"
    noted = store.quarantines.record(["b", "a", "b"], where="reward > 0.9", reason="broken verifier", run="demo")
    assert (noted.trace_ids, noted.run, noted.where) == (("a", "b"), "demo", "reward > 0.9")
    assert open_store(root).quarantines.all() == [noted]
    assert store.quarantines.table.read(store.quarantines.table.active_files()[0].path).num_rows == 1


def test_the_same_rollouts_and_reason_are_the_same_finding(store):
    first = store.quarantines.record(["a", "b"], where="one way", reason="why")
    assert store.quarantines.record(["b", "a"], where="another way", reason="why", run="demo") == first
    other = store.quarantines.record(["a", "b"], where="one way", reason="another reason")
    assert store.quarantines.ids() == [first.quarantine, other.quarantine]
    assert first.run == ALL_RUNS


def test_what_two_writers_recorded_at_once_is_one_finding(store, root):
    blind = Quarantines(store.root)
    blind.ids = lambda: []  # as if it had looked just before the other wrote
    first = store.quarantines.record(["a"], where="w", reason="r")
    assert blind.record(["a"], where="w", reason="r") == first
    assert open_store(root).quarantines.all() == [first]


def test_reasons_of_chosen_findings(store):
    one = store.quarantines.record(["a", "b"], where="w", reason="one")
    two = store.quarantines.record(["b", "c"], where="w", reason="two")
    assert store.quarantines.reasons([]) == {}
    assert store.quarantines.reasons([two.quarantine]) == {"b": "two", "c": "two"}
    assert store.quarantines.reasons([two.quarantine, one.quarantine]) == {"a": "one", "b": "one", "c": "two"}
    with pytest.raises(StoreError, match="'nothing'") as caught:
        store.quarantines.reasons([one.quarantine, "nothing"])
    assert one.quarantine in caught.value.where
