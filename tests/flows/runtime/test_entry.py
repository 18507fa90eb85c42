"""What flow runs are called: as somebody has typed, or so that they can be told apart."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from flows.maintain import describe_maintenance
from flows.replay import NAME_CHARACTERS, describe_replay
from flows.runtime import entry
from flows.runtime.entry import flow_run_name, is_generated


@pytest.mark.parametrize(
    ("name", "generated"),
    [
        *((name, True) for name in ("cunning-falcon", "theta4-mixco", "rho-comae-berenices-void")),
        *((name, False) for name in ("my-run", "train-1a2b3c4d", "ablation", "alpha", "alphabet-sort", "pi4-5")),
    ],
)
def test_a_name_of_prefects_own_is_known(name: str, generated: bool) -> None:
    assert is_generated(name) is generated


@pytest.mark.parametrize(
    ("typed", "parameters", "name"),
    [
        ("cunning-falcon", {}, "train-1a2b3c4d"),
        ("cunning-falcon", {"name": "demo"}, "train-demo"),
        ("cunning-falcon", {"name": "train-demo"}, "train-demo"),
        ("higher rate", {"name": "demo"}, "higher rate"),
    ],
)
def test_a_typed_name_stays(monkeypatch: pytest.MonkeyPatch, typed: str, parameters: dict[str, Any], name: str) -> None:
    monkeypatch.setattr("prefect.runtime.flow_run", SimpleNamespace(name=typed, parameters=parameters))
    monkeypatch.setattr(entry, "current_flow_run", lambda: "1a2b3c4d-and-more")
    assert flow_run_name("train")() == name


def test_replays_and_maintenance_are_told_apart() -> None:
    assert describe_replay({"run": "demo"}) == "replay-demo"
    asked = {"run": "demo", "from_stage": "advantage", "steps": "3:10", "overrides": ["algorithm.type=rloo"]}
    assert describe_replay(asked) == "replay-demo-advantage-3:10-algorithm.type=rloo"
    assert len(describe_replay({"run": "demo", "overrides": ["x" * 200]})) == NAME_CHARACTERS
    assert describe_maintenance({"advanced": {"store": "s3://bucket/team/"}}) == "maintain-team"
    thinned = {"advanced": {"store": "/data/runs"}, "keep": ["demo"], "keep_last": 3, "dry_run": True}
    assert describe_maintenance(thinned) == "maintain-runs-keep-demo-keep-last-3-dry-run"


def test_what_services_write_goes_to_the_logs_of_the_flow_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = entry.LogWatcher()
    watcher("service_lines", {"service": "engine", "lines": ["before the flow run is known"]})
    monkeypatch.setattr(entry, "flow_logger", lambda: logging.getLogger("flow run"))
    with caplog.at_level("INFO", "flow run"):
        watcher("service_lines", {"service": "engine", "lines": ["loading 100%", "ready"]})
    assert caplog.messages == ["[engine] loading 100%", "[engine] ready"]
