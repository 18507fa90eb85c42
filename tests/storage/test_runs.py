"""Runs: events in order, the config used last, and defaults taken from before."""

from pathlib import Path

import pytest

from storage.errors import RunUnknown
from storage.store import Store, open_store


def test_events_of_a_run(store: Store, root: Path) -> None:
    assert store.runs.names() == []
    assert store.runs.latest() is None
    started = store.runs.record(
        run="a", event="started", kind="train", config={"steps": 2, "rate": 0.1}, parent_run="p"
    )
    store.runs.record(run="b", event="started", kind="sft", config={}, host="elsewhere", pid=7)
    store.runs.record(run="a", event="resumed", config={"steps": 3})
    failed = store.runs.record(run="a", event="failed", step=2, message="why", flow_run="flow")
    runs = open_store(root).runs
    assert [event.event for event in runs.events("a")] == ["started", "resumed", "failed"]
    assert runs.events("a")[0] == started
    assert runs.events("a")[-1] == failed
    assert (failed.kind, failed.config, failed.parent_run, failed.step) == ("train", {"steps": 3}, "p", 2)
    assert (runs.events("b")[0].host, runs.events("b")[0].pid) == ("elsewhere", 7)
    assert runs.config("a") == {"steps": 3}
    assert runs.names() == ["b", "a"]
    assert runs.latest() == "a"


def test_a_run_that_is_not_there(store: Store) -> None:
    store.runs.record(run="known", event="started", kind="train", config={})
    with pytest.raises(RunUnknown, match="'other'") as caught:
        store.runs.events("other")
    assert "known" in caught.value.where
    with pytest.raises(RunUnknown):
        store.runs.config("other")
    with pytest.raises(RunUnknown, match="kind and config"):
        store.runs.record(run="new", event="started")


def test_names_that_are_nearly_right_are_named_before_the_last_ones(store: Store) -> None:
    for name in ("demo", "demo-by-rloo", *(f"other{number}" for number in range(6))):
        store.runs.record(run=name, event="started", kind="train", config={})
    with pytest.raises(RunUnknown) as near:
        store.runs.events("dmo")
    assert near.value.where == "the nearest runs are: demo"
    with pytest.raises(RunUnknown) as far:
        store.runs.events("xyz")
    assert far.value.where == "the last runs are: other1, other2, other3, other4, other5"
