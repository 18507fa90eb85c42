"""What is said of a step: above all, when hardly anything of it could be trained on."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.run import View
from flows.runtime import pipeline
from flows.runtime import step_report as outcome
from flows.runtime.step_report import finish_step, low_signal
from tasks.runtime.stage import Policy, Tables
from tests.fixtures import rehearsal
from tests.fixtures.builders import table
from tests.fixtures.rehearsal import SOURCE, Rehearsal, session_for


def step_of(trained: int, others: int) -> dict[str, Any]:
    shares = [{"outcome": "trained", "num_traces": trained}, {"outcome": "filtered", "num_traces": others}]
    return {"step": 4, "num_traces": trained + others, "outcomes": [share for share in shares if share["num_traces"]]}


@pytest.mark.parametrize(("trained", "others", "warned"), [(0, 10, True), (1, 9, True), (2, 8, False), (10, 0, False)])
def test_a_tenth_or_less_to_train_on_is_worth_a_warning(trained: int, others: int, warned: bool) -> None:
    warning = low_signal(step_of(trained, others))
    assert bool(warning) is warned
    assert not warned or f"only {trained} of 10 rollouts" in warning


@pytest.mark.parametrize(("computed", "told"), [(True, ["step", "note"]), (False, ["step"])])
def test_the_warning_reaches_whoever_watches(monkeypatch: pytest.MonkeyPatch, computed: bool, told: list[str]) -> None:
    events: list[str] = []
    session: Any = SimpleNamespace(context=None, notify=lambda event, **facts: events.append(event))
    finished: Any = SimpleNamespace(step=4, refs=(), batch=None)
    monkeypatch.setattr(outcome, "describe", lambda *_: step_of(0, 10) | {"computed": computed})
    monkeypatch.setattr(outcome, "quarantine_warning", lambda *_: "")
    finish_step(session, finished)
    assert events == told


def test_a_run_with_hardly_anything_to_train_on_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine of ten groups are equal: two rollouts of twenty are left, a tenth, and one more group would be enough."""
    told: list[str] = []
    for name, equal in (("low", 9), ("enough", 8)):
        stage = replace(rehearsal.STAND_INS["rollout"], function=partial(mostly_equal, equal))
        monkeypatch.setitem(rehearsal.STAND_INS, "rollout", stage)
        session = session_for(tmp_path / name, name, steps=1, assignment={"groups_per_step": 10, "group_size": 2})
        session.watchers = (lambda event, facts: told.append(facts["text"]) if event == "note" else None,)
        for finished in pipeline.run_steps(Rehearsal(session), SOURCE, session.config):
            described = finish_step(session, finished)
        assert described["metrics"]["trainable/all/ratio"] == (10 - equal) / 10
        assert described["metrics"]["samples_per_rollout/all"] == 1.0
    (warning,) = told
    assert warning.startswith("step 0: only 2 of 20 rollouts could be trained on; look at the environment")


def mostly_equal(equal: int, tables: Tables, config: View, *, step: int, policy: Policy) -> Tables:
    """Stand in for sampling: the rollouts of the first groups all earn the same."""
    made = rehearsal.sampled(tables, config, step=step, policy=policy)
    rows = [
        row | ({"reward": 1.0} if number < 2 * equal else {}) for number, row in enumerate(made["traces"].to_pylist())
    ]
    return {**made, "traces": table("traces", rows)}
