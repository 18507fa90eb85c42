"""Events for automations: when a reward has dropped, and that none of them can fail a run."""

from typing import Any

import pytest

from flows.orchestration import events
from flows.orchestration.events import EventWatcher, RewardDrop
from tasks.runtime.stage import Ref

RISING = [0.1, 0.1, 0.1, 0.5, 0.8, 0.8, 0.8]


def told(*rewards: float | None) -> list[int]:
    """The steps after which a drop is told."""
    drop = RewardDrop()
    return [step for step, reward in enumerate(rewards) if drop(reward) is not None]


@pytest.mark.parametrize(
    ("rewards", "steps"),
    [
        (RISING, []),
        ([*RISING, 0.7, 0.7, 0.6], []),
        ([*RISING, 0.1, 0.1, 0.1, 0.1], [8]),
        ([*RISING, 0.1, 0.1, 0.1, 0.8, 0.8, 0.8, 0.1, 0.1, 0.1], [8, 14]),
        ([*RISING, None, 0.1, None, 0.1], [10]),
        ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5], []),
        ([-1.0, -1.0, -1.0, 0.0, 0.0, 0.0, -0.9, -0.9, -0.9], [7]),
    ],
)
def test_a_drop_is_told_once_when_half_of_what_was_won_is_lost(rewards: list[float | None], steps: list[int]) -> None:
    assert told(*rewards) == steps


def test_outside_of_a_flow_run_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("prefect.events.emit_event", lambda *given, **named: sent.append(given))
    watch = EventWatcher("a", "store")
    done = {"ref": Ref("training", 2, "k" * 32, (("updates", 1),), 0, 0.0, True, "a")}
    watch("done", done)
    assert sent == []
    monkeypatch.setattr(events, "current_flow_run", lambda: "its id")
    watch("done", done)
    watch("unknown", {})
    assert sent == [("stagecoach.policy.published",)]


def test_an_event_that_cannot_be_sent_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any, **named: Any) -> None:
        raise RuntimeError("no thread\nleft")

    monkeypatch.setattr("prefect.events.emit_event", broken)
    monkeypatch.setattr(events, "current_flow_run", lambda: "its id")
    EventWatcher("a", "store")("end", {"ending": "finished", "text": "run a finished"})
    assert "stagecoach.run.finished was not sent to Prefect: RuntimeError: no thread" in caplog.text


@pytest.mark.parametrize(("num_computed", "sent"), [(0, ["finished", "cached"]), (3, ["finished"])])
def test_a_run_that_computed_nothing_is_an_event(
    monkeypatch: pytest.MonkeyPatch, num_computed: int, sent: list[str]
) -> None:
    names: list[str] = []
    monkeypatch.setattr("prefect.events.emit_event", lambda event, **named: names.append(event.rpartition(".")[2]))
    monkeypatch.setattr(events, "current_flow_run", lambda: "its id")
    EventWatcher("a", "store")("end", {"ending": "finished", "text": "run a", "num_computed": num_computed})
    assert names == sent
