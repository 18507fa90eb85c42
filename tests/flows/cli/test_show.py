"""Showing a run: for people, for programs, and what a change would compute again."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from configs.run import RunConfig
from flows.cli import show
from flows.queries.run_state import process_gone
from flows.queries.store_reader import StoreReader
from flows.services.ownership import OWNER, SERVICE, identity
from flows.viewer.rendering import PAGES, as_html, parsed_address
from storage.errors import LayoutError, RunUnknown
from storage.store import Store, open_store
from tasks.metrics import stage as metrics
from tasks.runtime.execute import perform
from tasks.runtime.imports import DISTRIBUTION
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref, Stage, Tables
from tests.fixtures.builders import failed, stage_of, table, trace
from tests.fixtures.commands import Call

CONFIG = RunConfig(name="a", steps=2)
EVALUATED = Ref("evaluation_assignment", 0, "k", (), 0, 0.0, True)


def finished_run(root: Path) -> Store:
    """A store with one recorded run of one step whose rollouts are there, one of them errored."""
    store = open_store(root)
    store.runs.record(run="a", event="started", kind="train", config=CONFIG.model_dump(mode="json"))
    rows = [trace("t0", reward=1.0), trace("t1", reward=0.0), trace("t2", reward=None, error_class="timeout")]
    made: Tables = {"traces": table("traces", rows)}
    stage = stage_of("rollout", lambda tables, view: made, ("traces",), sections=("rollout",))
    sample(stage, RunContext(store, "a", CONFIG, {}), 0)
    return store


def of_traces(*rows: dict[str, Any], name: str = "rollout") -> Stage:
    """Return a stage that makes these traces, without asking for any setting."""
    return stage_of(name, lambda tables, view: {"traces": table("traces", list(rows))}, ("traces",))


def sample(stage: Stage, context: RunContext, step: int) -> None:
    """Do a step that ends with its rollouts, and write its metrics."""
    perform(metrics.STAGE, context, step, (perform(stage, context, step),), parameters=0)


def test_a_run_is_described_for_programs_and_for_people(tmp_path: Path, call: Call) -> None:
    finished_run(tmp_path)
    found = json.loads(call("show", "latest", "--json")[1])
    (step,) = found["steps"]
    assert (found["run"], found["state"], found["num_steps"]) == ("a", "started", 2)
    assert step["reward"] == 0.5  # the errored rollout has no reward, which is not a reward of zero
    assert step["finished"] and step["rows"]["rollout"] == {"traces": 3} and step["rows"]["metrics"]["metrics"] > 20
    assert step["tokens"] == {"rollout": 15}
    assert step["seconds"]["rollout"] >= 0.0 and step["shared"] == []
    _, printed = call("show", "a")
    assert "1 of 3 rollouts errored (timeout 1)" in printed and "step  reward  errored  kept" in printed
    assert "train a: started, 1/2 steps" in printed and "rollout  " not in printed and "0.5" in printed
    assert "  rollout  " in call("show", "a", "--timing")[1]


def test_a_long_run_is_curves_and_its_last_steps(tmp_path: Path, call: Call) -> None:
    store = finished_run(tmp_path)
    for step in range(1, 12):
        rewarded = of_traces(trace("t0", reward=step / 16), trace("t1", reward=step / 16))
        sample(rewarded, RunContext(store, "a", CONFIG, {}), step)
    status, said = call("show", "a", "--last", "2")
    lines = said.splitlines()
    assert status == 0 and [" ".join(line.split()[:2]) for line in lines[-4:-2]] == ["10 0.625", "11 0.688"]
    assert "2 of 12 steps" in lines[-2]
    (reward,) = [line for line in lines if line.startswith("reward")]
    assert reward.split()[1:4] == ["0.5", "to", "0.688"] and reward.split()[4] == "▆▁▂▂▃▄▅▅▆▇▇█"
    assert max(map(len, lines[:-1])) <= 80


def test_one_step_is_shown_by_its_name(tmp_path: Path, call: Call) -> None:
    store = finished_run(tmp_path)
    sample(of_traces(trace("t0", reward=0.25)), RunContext(store, "a", CONFIG, {}), 1)
    status, printed = call("show", "a:1")
    assert status == 0 and "1 of 2 steps" in printed and "\n    1    0.25" in printed and "\n    0 " not in printed
    status, refusal = call("show", "a:7")
    assert status == 2 and "run 'a' has no step 7; it has 0-1" in refusal and "config" not in refusal


def test_lost_services_are_counted_for_people_programs_and_in_the_viewer(tmp_path: Path, call: Call) -> None:
    store = finished_run(tmp_path)
    store.runs.record(run="a", event="finished")
    assert "services lost" not in str(call("show", "a"))
    for service in ("engine", "learner", "engine"):
        store.runs.record(run="a", event="lost", message=f"{service}: was killed by signal 9; restart 1 of 3")
    found = show.describe(store, "a", CONFIG)
    assert (found["state"], found["lost_services"]) == ("finished", {"engine": 2, "learner": 1})
    _, said = call("show", "a")
    assert "services lost: engine 2, learner 1; the last one: engine: was killed by signal 9; restart 1 of 3" in said
    address, request = parsed_address("/runs/a")
    html = as_html(PAGES[address](StoreReader.at(tmp_path), request), request).decode()
    assert "engine 2, learner 1" in html and "killed by signal 9" in html


@pytest.mark.parametrize("name", ["demonstration", "import", "regrade"])
def test_rollouts_of_every_origin_have_their_reward_shown(tmp_path: Path, name: str) -> None:
    store = finished_run(tmp_path)
    sample(of_traces(trace("t0", reward=0.25), name=name), RunContext(store, "a", CONFIG, {}), 1)
    assert [step["reward"] for step in show.describe(store, "a", CONFIG)["steps"]] == [0.5, 0.25]


def test_of_a_step_that_is_not_finished_no_number_is_shown(tmp_path: Path) -> None:
    store = finished_run(tmp_path)
    perform(of_traces(trace()), RunContext(store, "a", CONFIG, {}), 1)
    (_, step) = show.describe(store, "a", CONFIG)["steps"]
    assert (step["finished"], step["reward"], step["rows"]) == (False, None, {"rollout": {"traces": 1}})


def test_what_another_run_computed_is_marked(tmp_path: Path) -> None:
    store = finished_run(tmp_path)
    config = RunConfig(name="b", steps=2)
    store.runs.record(run="b", event="started", kind="train", config=config.model_dump(mode="json"))
    stage = stage_of("rollout", lambda *_: pytest.fail("is in the ledger"), ("traces",), sections=("rollout",))
    ref: Ref = perform(stage, RunContext(store, "b", config, {}), 0)
    assert not ref.computed
    assert show.describe(store, "b", config)["steps"][0]["shared"] == ["rollout"]


def test_what_policies_scored_is_shown(tmp_path: Path, call: Call) -> None:
    store = finished_run(tmp_path)
    stage = of_traces(trace("e0", reward=1.0), trace("e1", reward=0.5), failed("e2"))
    perform(stage, RunContext(store, "a", CONFIG, {}), 3, (EVALUATED,))
    (found,) = json.loads(call("show", "a", "--json")[1])["evaluations"]
    assert (found["version"], found["scores"][0]["average"]) == (3, 0.75)
    said = "policy 3 on held-out reverse: average 0.750 [0.118, 0.985], pass@1 0.500 [0.055, 0.945] (3 attempts at 1"
    assert said in call("show", "a")[1]


@pytest.mark.parametrize(
    ("event", "host", "pid", "gone"),
    [
        ("started", socket.gethostname(), os.getpid(), False),
        ("resumed", socket.gethostname(), 2**22 + 1, True),  # above the greatest that Linux gives
        ("started", "elsewhere", 2**22 + 1, False),
        ("finished", socket.gethostname(), 2**22 + 1, False),
    ],
    # Names of their own: with numbers of processes in them, no two workers would know the same tests.
    ids=["it lives", "it is gone", "another machine", "it had ended"],
)
def test_a_run_whose_process_was_killed_says_so(
    tmp_path: Path, call: Call, event: str, host: str, pid: int, gone: bool
) -> None:
    store = finished_run(tmp_path)
    noted = store.runs.record(run="a", event=event, host=host, pid=pid)
    assert process_gone(noted) is gone
    assert (f"train a: {event}; its process is gone, 1/2 steps" in call("show", "a")[1]) is gone


def test_a_process_that_began_after_the_event_is_another_one(tmp_path: Path) -> None:
    noted = finished_run(tmp_path).runs.events("a")[-1]
    assert not process_gone(noted)
    assert process_gone(replace(noted, at=datetime(2001, 1, 1, tzinfo=UTC)))


def test_a_run_or_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    open_store(tmp_path / "empty")
    with pytest.raises(RunUnknown, match="none"):
        show.show("latest", store=str(tmp_path / "empty"))
    finished_run(tmp_path / "store")
    with pytest.raises(RunUnknown, match=r"(?s)^there is no run 'b'\n.*the last runs are: a\n  Safe: nothing"):
        show.show("b", store=str(tmp_path / "store"))
    with pytest.raises(LayoutError, match="there is no store"):
        show.show("latest", store=str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()


def test_runs_are_listed_and_chosen(tmp_path: Path, call: Call) -> None:
    finished_run(tmp_path)
    status, said = call("runs")
    heading, row = said.splitlines()
    assert status == 0 and heading.split()[:6] == ["run", "kind", "state", "steps", "reward", "held"]
    assert row.split()[:2] == ["a", "train"] and "0/2" in row.split() and "0.5" in row.split()
    assert "no runs" in call("runs", "--kind", "sft")[1]
    assert "no runs" in call("runs", "--state", "failed")[1]
    (found,) = json.loads(call("runs", "--state", "going", "--json")[1])
    assert (found["run"], found["rewards"], found["bytes"] > 0) == ("a", [0.5], True)


def test_logs_are_shown_by_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    finished_run(tmp_path)
    assert "run 'a' has no log of a service; there is: none" in call("logs")[1]
    logs = tmp_path / "logs/a"
    logs.mkdir(parents=True)
    for service in ("engine", "learner"):
        (logs / f"{service}.log").touch()
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda program, arguments: called.append(arguments))
    assert call("logs", "latest", "--lines", "3")[0] == 0
    assert call("logs", "a", "engine", "--follow")[0] == 0
    assert called == [
        ["tail", "-n", "3", "--", str(logs / "engine.log"), str(logs / "learner.log")],
        ["tail", "-n", "40", "-F", "--", str(logs / "engine.log")],
    ]
    status, said = call("logs", "a", "engin")
    assert status == 2 and "has no log of engin; there is: engine, learner" in said


@pytest.mark.engine
def test_status_names_what_is_at_work_its_services_and_a_gate_that_waits(tmp_path: Path, call: Call) -> None:
    store = finished_run(tmp_path)
    program = ["-c", "import time; print(flush=True); time.sleep(600)"]
    with subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE) as run:
        marks = os.environ | {OWNER: identity(run.pid), SERVICE: "engine"}
        with subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, env=marks) as engine:
            assert run.stdout and run.stdout.readline() and engine.stdout and engine.stdout.readline()
            store.runs.record(
                run="a", event="resumed", kind="train", config=CONFIG.model_dump(mode="json"), pid=run.pid
            )
            status, said = call("status", "--json")
            (found,) = json.loads(said)["runs"]
            assert (status, found["run"], found["pid"], found["last_stage"]) == (0, "a", run.pid, "metrics")
            assert (found["steps_done"], found["steps_planned"], found["waits_at_gate"]) == (0, 2, None)
            assert [(each["service"], each["pid"]) for each in found["services"]] == [("engine", engine.pid)]
            status, said = call("status", "a")
            assert status == 0 and said.startswith("train a: going, 0/2 steps") and "engine" in said
            engine.kill()
        run.kill()
    status, said = call("status")
    assert status == 1 and said == f"nothing is at work in store {tmp_path}\n"


def test_the_store_is_that_of_the_variable_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGECOACH_STORE", raising=False)
    assert RunConfig().store == "stagecoach-store"
    monkeypatch.setenv("STAGECOACH_STORE", str(tmp_path))
    assert RunConfig().store == str(tmp_path) and RunConfig(store="other").store == "other"


def test_the_version_is_said(call: Call) -> None:
    assert call("--version") == (0, f"stagecoach {version(DISTRIBUTION)}\n")


def test_a_state_has_its_colour_on_a_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    finished_run(tmp_path).runs.record(run="a", event="failed", kind="train", config=CONFIG.model_dump(mode="json"))
    red = "\x1b[31mfailed\x1b[0m"
    for command in (["runs"], ["show", "a"]):
        for told, shown in (({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)):
            for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
                monkeypatch.delenv(name, raising=False)
            for name, value in told.items():
                monkeypatch.setenv(name, value)
            _, printed = call(*command)
            assert (red in printed) is shown and "failed" in printed
