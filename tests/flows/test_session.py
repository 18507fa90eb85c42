"""What a session writes into a run's events, whichever way the run ends."""

from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.drawing import Evicted
from flows.processes.services import Supervisor
from flows.session import Session, recorded
from flows.steps import Source
from storage.store import open_store
from tasks.stage import Place


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """A session that starts nothing."""
    place = Place(open_store(tmp_path / "store"), "a", RunConfig(name="a"), {})
    return Session(place, Source("", ""), Supervisor("a", tmp_path / "logs"))


def events(session: Session) -> list[tuple[str, str]]:
    return [(event.event, event.message) for event in session.place.store.runs.events("a")]


def test_a_run_that_ends_well_is_started_and_finished(session: Session) -> None:
    for _ in range(2):
        with recorded(session):
            pass
    assert [event for event, _ in events(session)] == ["started", "finished", "resumed", "finished"]


def test_a_run_without_anything_to_train_on_is_marked_as_evicted(session: Session) -> None:
    with pytest.raises(Evicted), recorded(session):
        raise Evicted("step 3: nothing to train on")
    assert events(session)[-1] == ("evicted", "step 3: nothing to train on")


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_what_goes_wrong_is_in_the_events_and_passed_on(session: Session, error: BaseException) -> None:
    with pytest.raises(type(error)), recorded(session):
        raise error
    event, message = events(session)[-1]
    assert event == "failed" and message.startswith(type(error).__name__)
