"""Bad input on the command line: one clear message and status 2, with nothing started and nothing recorded."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows import cli
from flows.runtime.resolve_run import resolve_run
from tests.fixtures.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
Refused = Callable[..., str]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine at which nobody listens, and that nobody else is given meanwhile."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield int(probe.getsockname()[1])


@pytest.mark.engine
def test_the_guard_sees_a_service_that_is_started(
    place: Path, model: str, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With good input the same command does start something: the tests below are not vacuous."""
    monkeypatch.delitem(sys.modules, "prefect", raising=False)  # other tests of this process have imported it
    with pytest.raises(AssertionError, match="was started"):
        cli.main(["run", "demo", model, "engine.extra_arguments=[]"])
    assert started


@pytest.mark.fault("input", "a setting that cannot work", "one message with what is wrong; nothing started")
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainning.learning_rate=1", ["trainning: unknown key", "did you mean training"]),
        ("training.learning_rat=1", ["training.learning_rat: unknown key", "did you mean training.learning_rate"]),
        ("seed=soon", ["seed: ", "'soon'"]),
        ("steps=0", ["steps: ", "greater than or equal to 1"]),
        ("steps=2.5", ["steps: ", "2.5"]),
        ("rollout.max_off_policy_steps=-1", ["rollout.max_off_policy_steps: "]),
        ("name=a b", ["name: 'a b'"]),
        ("packing.tokens_per_row=128", ["packing.tokens_per_row: a row of 128 tokens", "engine.max_model_len 256"]),
        ("rollout.max_tokens=256", ["rollout.max_tokens: 256 leaves no room for a prompt"]),
        ("engine.max_model_len=1024", ["engine.max_model_len: 1024 is longer than the model's", "512"]),
        ("environments.0.taskset.id=no_such_place", ["taskset 'no_such_place' is not installed", "prime env install"]),
        ("environments.0.harness.id=no_such_harness", ["harness 'no_such_harness' is not installed"]),
        ("tracking={type='wandb',mode='online'}", ["tracking.mode is online", "WANDB_API_KEY", "offline"]),
        ("tracking={type='wandb',branches='fork'}", ["tracking.branches", "online"]),
    ],
)
def test_a_config_that_cannot_work(refused: Refused, model: str, override: str, words: list[str]) -> None:
    said = refused("run", "demo", model, override)
    assert all(word in said for word in words), said


@pytest.mark.fault("input", "several wrong settings", "all in one message; nothing started")
def test_all_mistakes_are_told_at_once(refused: Refused) -> None:
    said = refused("run", "demo", "stepps=1", "seed=x")
    assert all(word in said for word in ("2 problems", "stepps", "seed"))


def test_names_and_stores_are_text_whatever_they_look_like(place: Path, model: str) -> None:
    config = resolve_run("train", ["demo"], [model], name="2024", store="true", seed=3)
    assert (config.name, config.store, config.seed) == ("2024", "true", 3)


@pytest.mark.fault("input", "a model that is not there", "one message; nothing started")
@pytest.mark.parametrize(
    ("given", "words"), [(["model.path=./none"], "there is no directory ./none"), ([], "say which directory")]
)
def test_a_model_that_is_not_there(refused: Refused, given: list[str], words: str) -> None:
    assert f"model.path: {words}" in refused("run", "demo", *given)


@pytest.mark.fault("input", "a directory that is no model", "one message; nothing started")
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "cannot read config.json"),
        ({"config.json": "{"}, "config.json is not JSON"),
        ({"config.json": "{}"}, "names no vocab_size"),
        ({"config.json": '{"vocab_size": 8}'}, "no *.safetensors file"),
    ],
)
def test_a_directory_that_is_no_model(refused: Refused, place: Path, files: dict[str, str], words: str) -> None:
    directory = place / "thesis"
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text)
    said = refused("run", "demo", f"model.path={directory}")
    assert words in said and str(directory) in said


@pytest.mark.engine
def test_an_environment_that_is_installed_and_does_not_load(refused: Refused, model: str) -> None:
    said = refused("run", "demo", model, "environments.0.taskset.length_of_beard=3")
    assert "environment 'reverse_text' (taskset 'sample_reverse_text') cannot be loaded" in said
    assert "length_of_beard" in said


@pytest.mark.engine
def test_an_environment_that_does_not_import(
    refused: Refused, model: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "broken_place.py").write_text("import a_package_that_is_not_here\n")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", f"{place}:{ROOT}")
    said = refused("run", "demo", model, 'environments.0.taskset={id="broken_place"}')
    assert "does not import: module 'a_package_that_is_not_here' is missing" in said


@pytest.mark.fault("services", "an engine of others does not answer", "one message; nothing started")
def test_an_engine_of_others_that_does_not_answer(refused: Refused, model: str, closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    said = refused("run", "demo", model, f"engine.url={url}", "engine.startup_seconds=0.2")
    assert f"service 'engine' at {url} is not ready after 0.2 s" in said
    assert "check that it runs" in said


@pytest.mark.engine
def test_an_environment_server_of_others_that_does_not_answer(
    refused: Refused, model: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.services.process.EXTERNAL_SECONDS", 0.2)
    address = f"tcp://127.0.0.1:{closed_port}"
    said = refused("run", "demo", model, f"environments.0.address={address}")
    assert f"service 'environment reverse_text' at {address} is not ready" in said


@pytest.mark.engine
def test_a_prefect_api_that_does_not_answer(
    refused: Refused, model: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{closed_port}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    said = refused("run", "demo", model)
    assert f"the Prefect API at {url} does not answer" in said
    assert "unset PREFECT_API_URL" in said


@pytest.mark.engine
def test_the_command_itself_ends_with_status_2(place: Path) -> None:
    """Once as a process, as people call it."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "demo", "model.path=./none"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(place)},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("stagecoach: The config has a problem; nothing was started.\n  model.path: there is")
