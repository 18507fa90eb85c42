"""Showing a run: for people and for programs."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from configs.run import RunConfig
from flows.cli.run_report import describe
from flows.queries.run_state import process_gone
from flows.services.ownership import OWNER, SERVICE, start_time
from storage.store import open_store
from tasks.metrics import stage as metrics
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref, perform
from tests.fixtures.builders import failed, stage_of, table, trace
from tests.fixtures.commands import cases

CONFIG = RunConfig(name="a", steps=2)


def sampling(*rows, name="rollout"):
    """Return a stage that makes these traces; `rollout` reads its section, and the others no setting."""
    sections = ("rollout",) if name == "rollout" else ()
    return stage_of(name, lambda tables, view: {"traces": table("traces", rows)}, ("traces",), sections=sections)


def sample(store, step, *rows, name="rollout"):
    """Record a step of run `a` that ends with these rollouts, and its metrics."""
    context = RunContext(store, "a", CONFIG, {})
    perform(metrics.STAGE, context, step, (perform(sampling(*rows, name=name), context, step),), parameters=0)


def record(store, run="a", event="started", **more):
    """Record an event of a run that trains."""
    return store.runs.record(run=run, event=event, kind="train", config=CONFIG.model_dump(mode="json"), **more)


@pytest.fixture
def store(tmp_path):
    """A store with one recorded run of one step whose rollouts are there, one of them errored."""
    made = open_store(tmp_path / "store")
    record(made)
    sample(made, 0, trace("t0", reward=1.0), trace("t1", reward=0.0), trace("t2", reward=None, error_class="timeout"))
    return made


def test_a_run_is_described_for_programs_and_for_people(store, call):
    report = json.loads(call("show", "latest", "--json")[1])
    (step,) = report["steps"]
    assert (report["run"], report["state"], report["num_steps"]) == ("a", "going", 2)
    assert step["reward"] == 0.5  # the errored rollout has no reward, which is not a reward of zero
    assert step["finished"] and step["num_traces"] == 3
    read = [name for name in step["metrics"] if not name.startswith(("timing/", "tokens"))]
    assert 0 < len(read) < 20, "a step has a hundred"
    assert step["tokens"] == 15 and step["metrics"]["timing/stage/rollout"] >= 0.0
    _, printed = call("show", "a")
    assert "1 of 3 rollouts errored (timeout 1)" in printed and "step  reward  errored  kept" in printed
    assert "train a: going, 1/2 steps" in printed


def test_a_long_run_is_curves_and_its_last_steps_and_one_step_is_shown_by_its_name(store, call):
    for step in range(1, 12):
        sample(store, step, trace("t0", reward=step / 16), trace("t1", reward=step / 16))
    lines = call("show", "a", "--last", "2")[1].splitlines()
    assert [" ".join(line.split()[:2]) for line in lines[-3:-1]] == ["10 0.625", "11 0.688"]
    assert "2 of 12 steps" in lines[-1]
    (reward,) = [line for line in lines if line.startswith("reward")]
    assert reward.split()[1:4] == ["0.5", "to", "0.688"] and reward.split()[4] == "▆▁▂▂▃▄▅▅▆▇▇█"
    assert max(map(len, lines)) <= 80
    printed = call("show", "a:4")[1]
    assert "1 of 12 steps" in printed and "\n    4    0.25" in printed and "\n    0 " not in printed
    assert json.loads(call("show", "a:4", "--json")[1])["reward"] == 0.25


def test_lost_services_are_counted(store, call):
    record(store, event="finished")
    assert "services lost" not in call("show", "a")[1]
    for service in ("engine", "learner", "engine"):
        store.runs.record(run="a", event="lost", message=f"{service}: was killed by signal 9; restart 1 of 3")
    report = describe(store, "a", CONFIG)
    assert (report["state"], report["lost_services"]) == ("finished", {"engine": 2, "learner": 1})
    assert "services lost: engine 2, learner 1" in call("show", "a")[1]


@pytest.mark.parametrize("name", ["demonstration", "import", "regrade"])
def test_rollouts_of_every_origin_have_their_reward_shown(store, name):
    sample(store, 1, trace("t0", reward=0.25), name=name)
    assert [step["reward"] for step in describe(store, "a", CONFIG)["steps"]] == [0.5, 0.25]


def test_scores_of_policies_are_shown(store, call):
    stage = sampling(trace("e0", reward=1.0), trace("e1", reward=0.5), failed("e2"), name="import")
    evaluated = Ref("evaluation_assignment", 0, "k", (), 0, 0.0, True)
    perform(replace(stage, name="rollout"), RunContext(store, "a", CONFIG, {}), 3, (evaluated,))
    (found,) = json.loads(call("show", "a", "--json")[1])["evaluations"]
    assert (found["version"], found["scores"][0]["average"]) == (3, 0.75)
    line = (
        "policy 3 on held-out reverse: avg 0.750 [0.118, 0.985], pass@1 0.500 [0.055, 0.945], 1 of 3 failed (timeout 1)"
    )
    assert f"{line}; 3 attempts at 1 examples" in call("show", "a")[1].replace("\n", " ")


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
def test_a_run_whose_process_was_killed_is_marked(store, call, event, host, pid, gone):
    recorded = store.runs.record(run="a", event=event, host=host, pid=pid)
    assert process_gone(recorded) is gone
    assert ("train a: its process is gone, 1/2 steps" in call("show", "a")[1]) is gone


@cases(__file__, "missing")
def test_runs_steps_and_stores_that_do_not_exist_are_named(store, tmp_path, monkeypatch, call, argv, words):
    monkeypatch.chdir(tmp_path)
    open_store(tmp_path / "empty")
    status, message = call(*argv.split())
    assert status == 2 and all(word in message for word in words)
    assert not (tmp_path / "typo").exists()


def test_runs_are_listed(store, call, monkeypatch):
    status, printed = call("runs")
    heading, row = (line.split("\t") for line in printed.splitlines())
    values = dict(zip(heading, row, strict=True))
    assert status == 0 and (values["run"], values["steps_done"], values["rewards"]) == ("a", "0", "[0.5]")
    monkeypatch.setenv("COLUMNS", "80")
    heading, row = call("ls")[1].splitlines()
    assert heading.split()[:6] == ["run", "kind", "state", "steps", "reward", "held"]
    assert row.split()[:2] == ["a", "train"] and "0/2" in row.split() and "0.5" in row.split()
    (found,) = json.loads(call("runs", "--json")[1])
    assert [*found] == sorted(values), "names of both are the same"
    assert (found["run"], found["rewards"], found["bytes"] > 0) == ("a", [0.5], True)


@pytest.mark.engine
def test_status_names_what_is_at_work_its_services_and_a_gate_that_waits(store, tmp_path, call):
    program = ["-c", "import time; print(flush=True); time.sleep(600)"]
    with subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE) as run:
        marks = os.environ | {OWNER: f"{run.pid}:{start_time(run.pid)}", SERVICE: "engine"}
        with subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, env=marks) as engine:
            assert run.stdout and run.stdout.readline() and engine.stdout and engine.stdout.readline()
            record(store, event="resumed", pid=run.pid)
            status, said = call("status", "--json")
            (found,) = json.loads(said)["runs"]
            assert (status, found["run"]) == (0, "a")
            assert (found["steps_done"], found["steps_planned"], found["waits_at_gate"]) == (0, 2, None)
            assert found["services"] == {"engine": engine.pid}
            status, said = call("status")
            assert status == 0 and f'"engine": {engine.pid}' in said
            engine.kill()
        run.kill()
    status, said = call("status")
    assert status == 1 and said == f"no live runs in {tmp_path}/store\n"


def test_the_store_is_that_of_the_variable_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("STAGECOACH_STORE", raising=False)
    assert RunConfig().store == "stagecoach-store"
    monkeypatch.setenv("STAGECOACH_STORE", str(tmp_path))
    assert RunConfig().store == str(tmp_path) and RunConfig(store="other").store == "other"


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False), ({}, False)],
)
def test_a_state_has_its_colour_on_a_terminal_alone(store, monkeypatch, call, variables, is_coloured):
    record(store, event="failed")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "100")  # a pipe gets values
    for command in (["runs"], ["show", "a"]):
        printed = call(*command)[1]
        assert "failed" in printed and ("\x1b[31mfailed\x1b[0m" in printed) is is_coloured
