"""Agent programs of strangers, unchanged from PyPI, in real runs of two steps; and a run whose services are killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from storage.store import open_store
from tests.acceptance.lives import LivedRun, stagecoach
from tests.fixtures.driving import ROOT, check_once, rows
from tests.fixtures.faults import happened
from tests.fixtures.warming import warmed

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]

PACKAGES = ("pydantic-ai-slim[cli,openai]==2.68.0", "mini-swe-agent==2.4.6")
FILES = {
    "agent.yml": {},
    "mini.yaml": {
        "agent": {"system_template": "Use bash.", "instance_template": "{{task}}", "step_limit": 3},
        "model": {"observation_template": "{{output.output}}", "format_error_template": "{{error}}"},
    },
}
MINI = "mini -c mini.yaml --yolo --exit-immediately --model-class litellm -m openai/policy -t {prompt}"
PROGRAMS = {
    "chat": "pai -a agent.yml -m openai-chat:policy {prompt}",
    "responses": "pai -a agent.yml -m openai-responses:policy {prompt}",
    "mini": MINI,
}
VARIABLES = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
SETTINGS = (
    *("steps=2", "assignment.groups_per_step=2", "assignment.group_size=3", "evaluation.every=0"),
    *("engine.max_model_len=1024", "engine.startup_seconds=600", "packing.zero_advantages=true"),
    'filtering.filters=[{type="errored"},{type="zero_advantage",enforce=false}]',
)
KILLS = {f"after commit rollout {step} part": what for step, what in enumerate(("environment", "engine", "flow"))}


def played_by(command, **settings):
    """The override of a run whose rollouts are played by a command."""
    taskset = {"id": "sample_reverse_text", "num_examples": 50, "max_length": 5}
    harness = {"id": "program", "command": command, **settings}
    section = {"name": "agents", "taskset": taskset, "harness": harness, "max_turns": 3}
    return f"environments={json.dumps([section]).replace(': ', '=')}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with an environment that has the programs, their files and a warmed model."""
    place = tmp_path_factory.mktemp("strangers")
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, place / "venv"], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", place / "venv/bin/python", *PACKAGES]
    subprocess.run(install, check=True)
    for name, content in FILES.items():
        (place / name).write_text(json.dumps(content))
    warmed(place / "model", {"enable_thinking": False}, num_updates=100)
    return place


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unchanged_program_is_trained(place, name):
    program, *arguments = PROGRAMS[name].split()
    command = [str(place / "venv/bin" / program), *arguments]
    section = played_by(command, files=[str(place / file) for file in FILES], env=VARIABLES)
    model = f"model.path={place / 'model'}"
    stagecoach("run", "demo", section, *SETTINGS, model, f"name={name}", f"store={place / 'store'}", cwd=place)
    store = open_store(place / "store")
    assert len(store.ledger.entries(run=name, stage="training")) == 2
    traces = rows(store, name)["traces"]
    assert sorted(row["policy_version"] for row in traces) == [0] * 6 + [1] * 6
    assert [row["error_message"] for row in traces if row["error_class"] or not row["num_output_tokens"]] == []
    endpoints = {call["endpoint"] for row in traces for call in json.loads(row["record"])["calls"]}
    assert endpoints == {"/responses" if name == "responses" else "/chat/completions"}


@pytest.mark.fault(
    "services",
    "environment server, engine and flow are killed while agent programs are at work",
    "the rollouts in flight are played again, nothing is recorded twice",
)
def test_kills_cost_a_turn_and_nothing_is_there_twice(tmp_path):
    talk = [sys.executable, str(ROOT / "tests/fixtures/agent.py"), str(tmp_path)]
    with LivedRun(tmp_path, played_by(["sh", "-c", 'echo -n talk | "$@"', "sh", *talk])) as run:
        run.live(KILLS, -9)
        run.live({})
        happened(str(run.receipts))
        assert len(run.receipts) == len(KILLS)
        check_once(run.root)
        traces = rows(run.store)["traces"]
        assert {(row["error_class"], row["num_turns"]) for row in traces} == {(None, 3)}
