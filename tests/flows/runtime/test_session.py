"""What a session writes into a run's events, whichever way the run ends."""

import signal
import weakref
from contextlib import contextmanager

import pytest

from configs.run import RunConfig
from flows.orchestration.signals import termination_reported
from flows.runtime.resolve_run import Source
from flows.runtime.session import Session, record_run
from flows.services.base import Supervisor
from flows.services.pools import TOKEN
from storage.errors import StoreUnavailable
from storage.store import open_store
from tasks.runtime.run_context import RunContext
from tests.fixtures.rehearsal import notes_of
from tests.fixtures.waiting import until


@pytest.fixture
def session(tmp_path):
    """A session that starts nothing."""
    return session_of(tmp_path)


def session_of(place, **sections):
    config = RunConfig.model_validate({"name": "a"} | sections)
    context = RunContext(open_store(place / "store"), "a", config, {})
    return Session(context, Source("", ""), Supervisor("a", place / "logs"))


@pytest.mark.parametrize(
    ("placement", "keywords", "takes"),
    [
        ("local", ("environments",), True),
        ("pools", ("engine", "environments", "learner"), False),
        ("pools", ("engine", "teachers"), True),  # frozen teachers are on the run's own machine
        ("local", (), False),
    ],
)
def test_a_run_takes_a_gpu_slot_of_the_machine_where_a_service_is_there(
    tmp_path, monkeypatch, placement, keywords, takes
):
    held, begun = [], []

    @contextmanager
    def slot(run, tell):
        held.append("slot")
        yield

    monkeypatch.setenv(TOKEN, "of these machines")
    monkeypatch.setattr("flows.runtime.session.gpu_slot", slot)
    monkeypatch.setattr("flows.runtime.session.needs", lambda missing, config: list(keywords))
    session = session_of(tmp_path, placement={"services": placement})
    for each in keywords:
        monkeypatch.setattr(getattr(session, each), "begin", lambda each=each: begun.append(each))
    with session.slot:
        session.begin(())
    assert begun == list(keywords) and bool(held) == takes


def begin_stage(session, step, stage="rollout"):
    session.notify("stage", stage=stage, step=step, evaluating=False)


def refuse(*_):
    raise StoreUnavailable("no answer")


def events(session):
    return [(event.event, event.message) for event in session.context.store.runs.events("a")]


def test_a_run_that_ends_well_is_started_and_finished(session):
    for _ in range(2):
        with record_run(session):
            pass
    assert [event for event, _ in events(session)] == ["started", "finished", "resumed", "finished"]


@pytest.mark.parametrize(
    ("error", "event", "told"),
    [(ValueError("broken"), "failed", "ValueError: broken"), (KeyboardInterrupt(), "interrupted", "from the keyboard")],
)
def test_what_goes_wrong_is_in_the_events_and_passed_on(session, error, event, told):
    with pytest.raises(type(error)), record_run(session):
        raise error
    assert events(session)[-1][0] == event and told in events(session)[-1][1]


def test_a_process_that_goes_to_work_later_is_a_note_once_at_the_next_step(session):
    notes = notes_of(session)
    with record_run(session):
        begin_stage(session, 1)
        assert notes == []
        session.context.store.runs.record(run="a", event="resumed", pid=7, host="elsewhere")
        for step, stage in ((1, "packing"), (2, "rollout"), (2, "packing"), (3, "rollout")):
            begin_stage(session, step, stage)
    (note,) = (each for each in notes if each.startswith("run a is at work in another process"))
    assert "7 on elsewhere" in note


class TerminationSignal(BaseException):
    """Stands for what Prefect raises in a flow at SIGTERM; it is known by its name."""


def as_prefect_does(*_):
    raise TerminationSignal


@pytest.fixture
def handled():
    """Sets the handler of SIGTERM; the one before is put back."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGTERM, before)


def told_in_a_callback():
    """Get a signal where an exception is printed and lost; then wait for what it does."""

    class Thing:
        pass

    thing = Thing()
    watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    del thing
    until(lambda: False, lambda: f"the signal was lost for good, {watched}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_was_printed_and_lost_ends_a_run_all_the_same(session, handled):
    handled(as_prefect_does)
    with pytest.raises(TerminationSignal), record_run(session):
        told_in_a_callback()
    assert events(session)[-1][0] == "interrupted"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_outside_a_flow_of_prefect_is_not_lost_either(session):
    with pytest.raises(SystemExit, match="143"), termination_reported(), record_run(session):
        told_in_a_callback()


LOSS = "engine: was killed by signal 9; restart 1 of 3; log: engine.log"
SLOW = "engine: still starting, 30 s; log: engine.log"


def test_a_lost_service_is_shown_and_an_event_that_says_nothing_of_the_state_of_the_run(session):
    seen = []
    session.watchers = (lambda event, facts: seen.append((event, facts)),)
    runs = session.context.store.runs
    session.note_service("lost", service="engine", text=LOSS)
    assert runs.names() == [], "a run begins with its own first event"
    with record_run(session):
        begin_stage(session, 3)
        session.note_service("note", text=SLOW)
        session.note_service("lost", service="engine", text=LOSS)
        assert [(loss.event, loss.step, loss.message) for loss in runs.lost_services("a")] == [("lost", 3, LOSS)]
        assert runs.last_event("a") == "started" and runs.config("a")["name"] == "a"
    assert [event for event, _ in events(session)] == ["started", "finished"]
    assert [facts["text"] for event, facts in seen if event == "note"] == [LOSS, SLOW, LOSS]
    assert [facts["service"] for event, facts in seen if event == "lost"] == ["engine", "engine"]


def test_a_store_that_refuses_a_loss_stops_nobody(session, monkeypatch):
    seen = notes_of(session)
    with record_run(session), monkeypatch.context() as patch:
        patch.setattr(session.context.store.runs, "add_records", refuse)
        session.note_service("lost", service="engine", text=LOSS)
    assert seen[-1] == "the loss of engine is not among the run's events: no answer"


def test_an_interrupted_run_says_how_it_goes_on_and_a_store_that_refuses_its_end_hides_nothing(session, monkeypatch):
    with pytest.raises(KeyboardInterrupt) as raised, record_run(session):
        monkeypatch.setattr(session.context.store.runs, "add_records", refuse)
        raise KeyboardInterrupt
    store = session.config.store
    assert raised.value.__notes__ == [
        "This is not among the run's events: no answer",
        f"What is committed is safe; go on with: stagecoach resume a --store {store}",
    ]
