"""Work that is committed in a thread: what is found meanwhile, in which order it counts, and what a failure leaves."""

import threading
from dataclasses import replace
from functools import partial

import pytest

from configs.run import RunConfig
from storage.errors import StoreUnavailable, WorkRemoved
from storage.ledger import Ledger
from storage.slices import Slices
from storage.store import open_store
from tasks.runtime import commit_queue
from tasks.runtime.commit_queue import CommitQueue
from tasks.runtime.parts import Parts
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import ref_of
from tests.fixtures.rows import entry, messages
from tests.fixtures.waiting import until


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


@pytest.fixture
def queue(store):
    with CommitQueue(store.slices, store.ledger) as made:
        yield made


def hand_over(queue, key, run="run"):
    made = queue.append("messages", messages(), run=run, step=0, key=key, attempt=f"{run}-{key}")
    return queue.commit(entry(key, run=run, attempt=f"{run}-{key}", outputs=(made,)))


def committed(store):
    return [each.key for each in open_store(store.root.address).ledger.entries()]


class Gate:
    """Holds commits to the ledger up until it is opened; notes which rows each of them has."""

    def __init__(self, monkeypatch):
        self.seen = []
        self.open, self.reached = threading.Event(), threading.Event()
        true = Ledger.commit_all

        def commit_all(ledger, entries):
            self.seen.append([each.key for each in entries])
            self.reached.set()
            assert self.open.wait(20)
            return true(ledger, entries)

        monkeypatch.setattr(Ledger, "commit_all", commit_all)


def test_work_is_found_before_it_counts_and_what_waits_shares_a_commit(store, queue, monkeypatch):
    gate = Gate(monkeypatch)
    first = hand_over(queue, "a")
    assert gate.reached.wait(20)
    assert [hand_over(queue, key).key for key in ("b", "c")] == ["b", "c"]
    assert queue.find("a") == first and queue.find("d") is None
    assert committed(store) == []
    gate.open.set()
    queue.flush()
    assert gate.seen == [["a"], ["b", "c"]]
    assert committed(store) == ["a", "b", "c"]
    assert queue.find("a") is None
    assert store.scan("messages").collect().height == 12


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), ValueError("a stage failed")], ids=type)
def test_what_is_finished_is_kept_when_an_error_passes(store, problem):
    with pytest.raises(type(problem)), CommitQueue(store.slices, store.ledger) as queue:
        hand_over(queue, "a")
        raise problem
    assert committed(store) == ["a"]


@pytest.mark.parametrize("ended_by", ["full", "flush", "flush_soon"])
def test_quick_stages_wait_for_each_other_and_not_for_long_ones(store, monkeypatch, ended_by):
    monkeypatch.setattr(commit_queue, "MAX_WAITING", 3 if ended_by == "full" else 128)
    gate = Gate(monkeypatch)
    gate.open.set()
    with CommitQueue(store.slices, store.ledger, linger_seconds=600) as queue:
        for key in ("a", "b"):
            hand_over(queue, key)
        assert not gate.reached.wait(0.2)
        if ended_by in ("flush", "flush_soon"):
            getattr(queue, ended_by)()
        else:
            hand_over(queue, "c")
        assert gate.reached.wait(20)
    assert gate.seen == [["a", "b"] if ended_by in ("flush", "flush_soon") else ["a", "b", "c"]]


def test_of_two_that_queue_the_same_work_both_rows_name_the_slices_of_the_first(store):
    other = open_store(store.root.address)
    with CommitQueue(other.slices, other.ledger, linger_seconds=600) as late:
        hand_over(late, "a", run="late")
        with CommitQueue(store.slices, store.ledger) as first:
            hand_over(first, "a", run="first")
    rows = open_store(store.root.address).ledger.entries()
    assert [(each.run, each.outputs[0].run) for each in rows] == [("first", "first"), ("late", "first")]
    assert store.scan("messages").collect().height == 4


def test_work_that_was_removed_meanwhile_takes_all_that_waited_with_it(store):
    with CommitQueue(store.slices, store.ledger) as first:
        found = hand_over(first, "a", run="first")
    other = open_store(store.root.address)
    with pytest.raises(WorkRemoved), CommitQueue(other.slices, other.ledger, linger_seconds=600) as late:
        hand_over(late, "b", run="late")
        late.commit(replace(found, run="late"))
        store.ledger.remove("first", [("a", "")], found.finished_at)
        with pytest.raises(WorkRemoved):
            late.flush()
    assert committed(store) == []


def lose(queue):
    hand_over(queue, "b")


@pytest.mark.parametrize("where", [(Slices, "commit"), (Ledger, "commit_all")], ids=["tables", "ledger"])
@pytest.mark.parametrize("told", [CommitQueue.flush, lose], ids=["flush", "commit"])
@pytest.mark.parametrize("made", [False, True], ids=["lost", "made"])
def test_a_commit_that_fails_is_told_to_the_next_who_asks_and_tried_again(
    store,
    monkeypatch,
    where,
    told,
    made,
):
    true = getattr(*where)
    problems = [StoreUnavailable("the store does not answer", "", "everything", "wait")]
    failed = threading.Event()

    def failing(*given):
        if problems:
            failed.set()
            if made:
                true(*given)
            raise problems.pop()
        return true(*given)

    monkeypatch.setattr(*where, failing)
    with CommitQueue(store.slices, store.ledger) as queue:
        hand_over(queue, "a")
        assert failed.wait(20)
        until(lambda: queue.failure is not None, lambda: "the failure is not kept", every=0.01)
        assert queue.find("a") is not None, "whoever is called again finds it"
        with pytest.raises(StoreUnavailable):
            told(queue)
        hand_over(queue, "c")
    assert committed(store) == ["a", "c"]
    assert store.scan("messages").collect().height == 8


def test_what_cannot_be_committed_at_the_end_is_an_error(store, monkeypatch):
    def unanswered(*_):
        raise StoreUnavailable("the store does not answer", "", "everything", "wait")

    monkeypatch.setattr(Slices, "commit", unanswered)
    with pytest.raises(StoreUnavailable), CommitQueue(store.slices, store.ledger) as queue:
        hand_over(queue, "a")
    with pytest.raises(KeyboardInterrupt) as caught, CommitQueue(store.slices, store.ledger) as queue:
        hand_over(queue, "b")
        raise KeyboardInterrupt
    assert "the store does not answer" in caught.value.__notes__[0]
    assert committed(store) == []


def test_nothing_counts_before_what_it_was_made_from(store, monkeypatch):
    gate = Gate(monkeypatch)
    context = RunContext(store, "run", RunConfig(name="run"), {})
    with context.queue_commits():
        first = context.append("messages", messages(), step=0, key="a", attempt="a")
        context.commit(entry("a", attempt="a", outputs=(first,)))
        assert context.table("messages", (ref_of(entry("a", outputs=(first,)), computed=True),)).num_rows == 4
        told = []
        tell = lambda units, count: told.append((len(units), count))  # noqa: E731
        parts = Parts(store, partial(make_part, "b"), ("messages", "trace_id"), context.flush, tell)
        parts.put({"messages": messages()})
        assert gate.reached.wait(20)
        assert told == [], "what is not committed is not counted"
        assert gate.seen == [["a"]]
        gate.open.set()
        parts.close()
        count = len(set(messages()["trace_id"].to_pylist()))
        assert told == [(count, count)]
        context.commit(entry("c", attempt="c"), commits_immediately=True)
        assert gate.seen == [["a"], ["b"], ["c"]]


def test_a_part_whose_commit_could_not_be_told_is_committed_once(store):
    told = []

    def tell(units, num_units):
        told.append(num_units)
        if len(told) == 1:
            raise ValueError("nobody listens")

    parts = Parts(store, partial(make_part, "a"), ("messages", "trace_id"), lambda: None, tell)
    parts.put({"messages": messages()})
    parts.close()
    assert committed(store) == ["a"] and told == [1]


def test_the_next_call_of_a_stage_raises_the_failure_of_a_part_which_is_committed_again(store, monkeypatch):
    true, problems = Ledger.commit, [StoreUnavailable("the store does not answer", "", "everything", "wait")]

    def commit(ledger, row):
        if problems:
            raise problems.pop()
        return true(ledger, row)

    monkeypatch.setattr(Ledger, "commit", commit)
    parts = Parts(store, partial(make_part, "a"), ("messages", "trace_id"), lambda: None, lambda *_: None)
    parts.put({"messages": messages()})
    until(lambda: parts.failure is not None, lambda: "the failure is not kept", every=0.01)
    with pytest.raises(StoreUnavailable):
        parts.finished_units()
    slices = parts.close()
    assert committed(store) == ["a"]
    assert open_store(store.root.address).read(slices).num_rows == messages().num_rows


def make_part(key, part, outputs, tokens):
    return entry(key, part=part, outputs=tuple(outputs), attempt=key)
