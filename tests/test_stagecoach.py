"""`import stagecoach`: the words of the command line, what is refused before anything starts, what is printed first."""

import asyncio
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import polars as pl
import pytest

import stagecoach
from configs.load import load
from flows.cli import run as commands
from flows.queries.request import NotThere
from flows.viewer.notebook import Plot, Viewer
from tests.fixtures.programs import environment
from tests.fixtures.rehearsal import rehearse

ROOT = Path(__file__).parents[1]
OF_COMMANDS = {"overrides", "dry_run"}
"""Arguments of commands that are items here, or print alone."""


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Let Prefect not have been imported, whatever tests ran in this process before."""
    monkeypatch.setattr("flows.orchestration.server.can_begin", lambda: True)


@pytest.mark.parametrize("name", ["run", "sft", "evaluate", "demo", "resume", "replay"])
def test_parameters_are_those_of_the_command(name):
    ours = set(inspect.signature(getattr(stagecoach, name)).parameters) - {"settings", "items", "run"}
    assert ours == set(inspect.signature(getattr(commands, name)).parameters) - {"items", "run", *OF_COMMANDS}


def test_keywords_are_overrides():
    given: dict[str, Any] = {
        "steps": 3,
        "model": {"path": Path("a dir/weights"), "renderer": None},
        "training": {"learning_rate": 1e-5, "betas": (0.9, 0.98)},
        "environments": [{"name": "own", "taskset": {"id": "own_data", "path": 'rows "1".jsonl'}}],
    }
    files, overrides = stagecoach._files_and_overrides(["demo", "algorithm.type=rloo"], given)
    config = load(files, overrides)
    assert (config.steps, config.model.path, config.algorithm.type) == (3, "a dir/weights", "rloo")
    assert (config.training.learning_rate, config.training.betas) == (1e-5, (0.9, 0.98))
    assert config.environments[0].taskset["path"] == 'rows "1".jsonl'
    assert config.model.renderer == "qwen3", "None leaves a setting as it is"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda store: stagecoach.run("demo", trainning={"learning_rate": 1}, store=store), "training"),
        (lambda store: stagecoach.run("demo", model={"path": "./none"}, store=store), "none"),
        (lambda store: stagecoach.demo("qwen3_gpu", store=store), "takes one of"),
        (lambda store: stagecoach.resume("latest", store=store), "no run yet"),
        (lambda store: stagecoach.resume("latest", "demo.toml", store=store), "overrides alone"),
        (lambda store: stagecoach.open(store), "no store"),
    ],
    ids=["key", "model", "demo", "resume", "items", "open"],
)
def test_mistakes_are_refused_before_anything_starts(call, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        call(tmp_path / "store")

    async def in_a_notebook() -> None:
        call(tmp_path / "store")

    with pytest.raises(ValueError, match=said):
        asyncio.run(in_a_notebook())


def test_work_is_done_beside_a_running_loop():
    async def in_a_notebook() -> int:
        return stagecoach._call_beside_loop(lambda: asyncio.run(asyncio.sleep(0, 7)))

    assert asyncio.run(in_a_notebook()) == 7 == stagecoach._call_beside_loop(lambda: asyncio.run(asyncio.sleep(0, 7)))


def said_by(code: str, directory: Path, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """Run code in a process without any Prefect server."""
    variables = environment() | {"PREFECT_HOME": str(directory / "home")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, timeout=seconds)


def test_importing_it_is_light(tmp_path):
    heavy = "{'prefect', 'torch', 'vllm', 'verifiers', 'transformers', 'polars', 'deltalake', 'cyclopts'}"
    done = said_by(f"import sys, stagecoach; print(sorted({heavy} & set(sys.modules)))", tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.engine
def test_without_a_prefect_server_the_way_is_named_at_once(tmp_path):
    done = said_by("import prefect, stagecoach; stagecoach.run('demo', store='s')", tmp_path)
    assert done.returncode == 1
    assert "ConfigError" in done.stderr and "Prefect was imported before" in done.stderr
    assert not (tmp_path / "s").exists() and "Starting temporary server" not in done.stderr


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A run of two steps."""
    root = tmp_path_factory.mktemp("python") / "store"
    rehearse(root, "demo")
    return root


@pytest.mark.engine
def test_a_store_a_run_and_a_rollout_say_what_a_person_wants_first(store):
    opened = stagecoach.open(store)
    assert "demo" in repr(opened)
    rollouts = opened.rollouts()
    assert set(rollouts["step"]) == {1} and rollouts["reply"].null_count() == 0
    assert "[assistant] text" in repr(opened.trace(rollouts["trace_id"][0]))
    with pytest.raises(NotThere, match=r"no run .other"):
        opened.rollouts("other")


def test_to_regrade_is_a_replay_that_scores_again(monkeypatch):
    asked = []
    monkeypatch.setattr(stagecoach, "_run_flow", lambda request, plain: asked.append(request))
    stagecoach.regrade("first", steps="3:10", name="again")
    stagecoach.regrade("first", until="training", algorithm={"type": "rloo"})
    assert [(each.from_stage, each.until, each.regrade) for each in asked] == [
        ("filtering", "packing", True),
        ("filtering", "training", True),
    ]
    assert (asked[0].steps, asked[0].name, asked[1].overrides) == ("3:10", "again", ['algorithm.type="rloo"'])


def test_what_a_script_gets_has_types():
    assert stagecoach.train is stagecoach.run
    for function in (stagecoach.train, stagecoach.regrade, stagecoach.open, Viewer.steps, Viewer.plot):
        returned = get_type_hints(function, vars(stagecoach) | {"Viewer": Viewer})["return"]
        assert returned in (stagecoach.Result, Viewer, pl.DataFrame, Plot)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_notebook_finds_a_reward_hack_mends_and_replays_it(tmp_path):
    notebook = json.loads((ROOT / "examples/reward_hack.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    check = "assert len(hacks) > 3 and (worth['reward'] < worth['reward_before']).all(), worth\nprint('told')"
    done = said_by("\n".join([*cells, check]), tmp_path, seconds=1400)
    assert done.stdout.splitlines()[-1] == "told", done.stdout[-2000:] + done.stderr[-4000:]


def test_a_result_prints_what_was_learnt():
    steps = [
        {"step": 0, "reward": 0.25, "update": {"loss": 0.5}},
        {"step": 1, "reward": 0.75, "update": {"loss": 0.25}},
    ]
    outcome = {"num_computed": 9, "num_found": 3, "steps": steps, "evaluations": [], "comparisons": []}
    printed = repr(stagecoach.Result("first", "train", "s", outcome))
    assert "train first: 2 steps, reward 0.25 to 0.75; 9 computed, 3 cached" in printed
    assert "stagecoach.open('s').rollouts('first')" in printed
    score = {"average": 0.5, "interval": None, "pass_at": [], "errors": {}}
    scored = repr(stagecoach.Result("e", "evaluate", "s", {"scores": [score], "num_computed": 3, "num_found": 0}))
    assert "evaluate e: avg 0.500; 3 computed, 0 cached" in scored
