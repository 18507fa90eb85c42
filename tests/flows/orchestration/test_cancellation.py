"""When a run asks whether it was cancelled, what it does then, and what a run without rewards shows instead."""

import io

import pytest

from flows.orchestration.states import ASK_SECONDS, Cancellation
from flows.reporting import artifacts
from flows.reporting.panel import Panel, PanelWatcher


class Api:
    """A stand-in for Prefect and for the clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.answer = False
        self.asked: list[str] = []

    def ask(self, flow_run: str) -> bool:
        self.asked.append(flow_run)
        return self.answer


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def cancellation(api: Api) -> Cancellation:
    return Cancellation(api.ask, lambda: api.now)


def test_it_asks_at_once_and_then_not_for_a_while(api: Api, cancellation: Cancellation) -> None:
    assert not cancellation.asked_for("run")
    api.answer = True
    api.now += ASK_SECONDS * 0.99
    assert not cancellation.asked_for("run")
    assert api.asked == ["run"]
    api.now += ASK_SECONDS * 0.02
    assert cancellation.asked_for("run")
    assert api.asked == ["run", "run"]


def test_once_cancelled_it_stays_so(api: Api, cancellation: Cancellation) -> None:
    api.answer = True
    assert cancellation.asked_for("run")
    api.answer = False
    api.now += 100 * ASK_SECONDS
    assert cancellation.asked_for("run")
    assert api.asked == ["run"]


def test_outside_a_flow_run_there_is_nobody_to_ask(api: Api, cancellation: Cancellation) -> None:
    api.answer = True
    assert not cancellation.asked_for(None)
    assert api.asked == []


def test_a_run_without_rewards_shows_its_loss() -> None:
    steps = [{"step": k, "reward": None, "update": {"loss": 2.5 - k}, "seconds": {"training": 1.0}} for k in (0, 1)]
    assert "t: loss by step" in artifacts.reward_curve(steps, "t")
    assert "loss 1.500 at step 1" in artifacts.reward_curve(steps, "t")
    rewarded = artifacts.reward_curve([*steps, {"step": 2, "reward": 0.5}], "t")
    assert "t: mean reward by step" in rewarded
    assert "loss" not in rewarded


@pytest.mark.parametrize(("measure", "line"), [("loss", "loss 2.500"), ("reward", "reward -")])
def test_the_panel_shows_what_is_measured(measure: str, line: str) -> None:
    out = io.StringIO()
    with Panel("sft x", num_steps=1, plain=True, stream=out, measure=measure) as panel:
        facts = {"step": 0, "reward": None, "tokens": 7, "seconds": {"training": 1.0}, "update": {"loss": 2.5}}
        PanelWatcher(panel)("step", facts)
    assert line in out.getvalue()
