"""Events for automations: when they are sent, and that none of them can fail a run."""

import pytest

from flows.orchestration import events
from flows.orchestration.events import EventWatcher
from tasks.runtime.stage import Ref


@pytest.fixture
def sent(monkeypatch):
    """The names of the events that were sent, within a flow run."""
    names = []
    monkeypatch.setattr("prefect.events.emit_event", lambda event, **named: names.append(event.rpartition(".")[2]))
    monkeypatch.setattr(events, "current_flow_run", lambda: "its id")
    return names


def test_outside_of_a_flow_run_nothing_is_sent(sent, monkeypatch):
    watch = EventWatcher("a", "store")
    done = {"ref": Ref("training", 2, "k" * 32, (("updates", 1),), 0, 0.0, True, "a")}
    with monkeypatch.context() as patch:
        patch.setattr(events, "current_flow_run", lambda: None)
        watch("done", done)
    assert sent == []
    watch("done", done)
    watch("unknown", {})
    watch("warning", {"text": "step 3: errors: ...", "step": 3, "rule": "errors", "where": ""})
    assert sent == ["published", "warning"]


def test_an_event_that_cannot_be_sent_is_a_line_in_the_log(sent, monkeypatch, caplog):
    def broken(*given, **named):
        raise RuntimeError("no thread\nleft")

    monkeypatch.setattr("prefect.events.emit_event", broken)
    EventWatcher("a", "store")("end", {"ending": "finished", "text": "run a finished"})
    assert "stagecoach.run.finished was not sent to Prefect: RuntimeError: no thread" in caplog.text
