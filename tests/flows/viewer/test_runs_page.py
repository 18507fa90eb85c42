"""The list of runs: what each came to, forks below what they branched off, and what is asked of the list."""

import os
import socket
from datetime import UTC, datetime, timedelta
from shutil import copytree

import pytest

from flows.cli.run_report import describe
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.run_state import GONE, deciding_event, is_going, seconds_at_work, state_of
from flows.queries.runs import runs
from flows.queries.store_reader import StoreReader
from flows.viewer.pages.runs import runs_page
from storage.records import Event
from storage.store import open_store
from tasks.runtime.services import Answer
from tests.fixtures.rehearsal import reported
from tests.fixtures.waiting import until
from tests.flows.viewer.looking import pluck

T0 = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def forked(forked, tmp_path_factory):
    """A run, a replay of it with another algorithm, and a run that failed."""
    root = copytree(forked.store.root.address, tmp_path_factory.mktemp("runs") / "store")
    store = open_store(root)
    store.runs.record(run="broken", event="started", kind="train", config={"name": "broken", "steps": 7})
    store.runs.record(run="broken", event="failed", message="full")
    return StoreReader.at(root)


def listed(library, **query):
    return pluck(runs_page(library, PageRequest("/", {}, query)).values["runs"], "run")


def test_what_each_run_came_to(forked):
    found = {row["run"]: row for row in runs(forked).to_dicts()}
    base, fork, broken = found["base"], found["fork"], found["broken"]
    told = describe(forked.store, "base", forked.config("base"))["steps"]
    assert base["rewards"] == pytest.approx(pluck(told, "reward"), rel=1e-12)
    assert (base["last_reward"], base["losses"], base["last_loss"]) == (base["rewards"][-1], [0.0, 0.1], 0.1)
    assert (base["steps_done"], base["steps_planned"], base["state"], base["parent"]) == (2, 2, "finished", None)
    assert base["tokens_sampled"] == forked.frames("base")["traces"].collect()["num_output_tokens"].sum()
    assert (fork["kind"], fork["parent"], fork["algorithms"]) == ("replay", "base", ["rloo"])
    assert (fork["steps_done"], fork["last_loss"]) == (2, None), "done as far as it goes, which is not to training"
    assert fork["rewards"] == base["rewards"], "the same rollouts, whoever computed them"
    assert (broken["state"], broken["message"], broken["steps_done"]) == ("failed", "full", 0)
    assert (broken["last_reward"], broken["held_out"], broken["rewards"]) == (None, None, [])


def test_the_list_is_filtered_and_sorted(forked):
    assert listed(forked, q="RLOO") == ["fork"]
    assert listed(forked, state="failed") == ["broken"]
    assert listed(forked, sort="run", down="1") == ["fork", "broken", "base"]
    assert listed(forked, sort="reward", down="1")[-1] == "broken"
    with pytest.raises(BadQuestion, match="sort='colour' is not known"):
        listed(forked, sort="colour")
    assert listed(forked) == ["broken", "fork", "base"], "the newest change first"


def test_the_start_page_says_what_happened_and_what_needs_a_person(forked, tmp_path):
    page = runs_page(forked, PageRequest("/", {}, {})).values
    assert pluck(page["needs"], "run", "what", "text") == [("broken", "failed", "full")]
    assert pluck(page["happened"][:2], "run", "event") == [("broken", "failed"), ("broken", "started")]
    asked = []

    def approve(question):
        def needs():
            return runs_page(StoreReader.at(tmp_path / "store"), PageRequest("/", {}, {})).values["needs"]

        until(needs, needs)
        asked.extend(needs())
        return Answer(True, "a person", "")

    reported(tmp_path / "store", "asking", approve=approve, steps=1, gate={"type": "pause"})
    command = "stagecoach gate asking --approve (or --refuse)"
    assert pluck(asked, "what", "text") == [("step 0 waits for approval", command)]
    answered = runs_page(StoreReader.at(tmp_path / "store"), PageRequest("/", {}, {})).values
    assert answered["needs"] == [] and answered["happened"][0]["event"] == "finished"


def event(name, minutes=0.0, **more):
    known = {"run": "a", "event": name, "at": T0 + timedelta(minutes=minutes), "kind": "train", "config": {}}
    known |= {"parent_run": None, "step": 0, "message": "", "flow_run": None, "host": "elsewhere", "pid": 1}
    return Event(**known | more)


@pytest.mark.parametrize(
    ("last", "state", "look"),
    [
        (event("finished"), "finished", "good"),
        (event("failed"), "failed", "bad"),
        (event("started"), "going", "going"),
        (event("resumed", host=socket.gethostname(), pid=2**22 + 1), GONE, "warn"),
    ],
)
def test_a_state_in_a_word(last, state, look):
    assert pluck([state_of(last)], "state", "look") == [(state, look)]
    assert is_going(last) == (state == "going")


def test_the_end_of_a_second_process_does_not_end_a_run_that_another_process_trains():
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    first = event("started", **here, at=datetime.now(UTC))
    second = [event(name, 1, pid=7) for name in ("resumed", "cancelled")]
    assert deciding_event([first, *second]) is first
    gone = event("started", **here | {"pid": 2**22 + 1})
    assert deciding_event([gone, *second]) is second[-1], "its process is gone"
    assert deciding_event([event("started"), *second]) is second[-1], "it cannot be seen from here"
    assert deciding_event([first, event("finished", 2, **here)]).event == "finished"


def test_the_list_says_that_it_is_live_only_while_a_run_is_going(forked, tmp_path):
    page = runs_page(forked, PageRequest("/"))
    assert page.live and page.quiet, "followed: something may begin"
    store = open_store(tmp_path)
    for event_name, quiet in (("started", False), ("finished", True)):
        store.runs.record(run="a", event=event_name, kind="train", config={"name": "a", "steps": 3})
        assert runs_page(StoreReader.at(tmp_path), PageRequest("/")).quiet is quiet


@pytest.mark.parametrize(
    ("events", "last_work", "minutes"),
    [
        ("started 0 finished 5", 4, 5),
        ("started 0 failed 5 resumed 60 finished 70", 69, 15),
        ("started 0", 3, 3),
        ("started 0", None, 0),
    ],
)
def test_the_time_at_work_leaves_out_what_was_idle(events, last_work, minutes):
    words = events.split()
    recorded = [event(name, float(at)) for name, at in zip(words[::2], words[1::2], strict=True)]
    last = None if last_work is None else T0 + timedelta(minutes=last_work)
    assert seconds_at_work(recorded, last) == 60 * minutes
