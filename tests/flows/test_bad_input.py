"""Bad input on the command line: one clear message and status 2, with nothing started and nothing recorded."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.run import RunConfig
from flows import cli, prefect_api
from flows.prepare import prepare
from flows.service import Handle
from storage.store import open_store

ROOT = Path(__file__).parents[2]
Refused = Callable[..., str]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with nothing configured for Prefect or Weights & Biases and no way to the hub."""
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home/prefect"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for processes that a command starts
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of services that were started, the Prefect server among them; none of them really is."""
    names: list[str] = []

    def launch(handle: Handle) -> None:
        names.append(handle.spec.name)
        raise AssertionError(f"{handle.spec.name} was started")

    monkeypatch.setattr(Handle, "_launch", launch)
    yield names


@pytest.fixture
def refused(place: Path, started: list[str], capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must be refused, and return what it says."""

    def run(*argv: str) -> str:
        store = place / "stagecoach-store"
        before = open_store(store).runs.names() if store.is_dir() else []
        capsys.readouterr()
        status = cli.main(argv)
        said = capsys.readouterr()
        assert status == 2
        assert said.err.startswith("stagecoach: ")
        assert "Traceback" not in said.err
        assert "nothing was" in said.err.lower()
        assert started == []
        assert prefect_api._embedded is None
        assert (open_store(store).runs.names() if store.is_dir() else []) == before
        assert not list(store.glob("prefect*"))
        return said.err

    return run


@pytest.fixture
def model(place: Path) -> str:
    """A directory that looks like a model from afar."""
    directory = place / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 512, "max_position_embeddings": 512}))
    header = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return f"model.path={directory}"


def closed_port() -> int:
    """Return a port of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_guard_sees_a_service_that_is_started(place: Path, model: str, started: list[str]) -> None:
    """With good input the same command does start something: the tests below are not vacuous."""
    with pytest.raises(AssertionError, match="was started"):
        cli.main(["run", "demo", model, "engine.extra_arguments=[]"])
    assert started


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainning.learning_rate=1", ["trainning: unknown key", "did you mean training"]),
        ("training.learning_rat=1", ["training.learning_rat: unknown key", "did you mean training.learning_rate"]),
        ("seed=soon", ["seed: ", "'soon'"]),
        ("steps=0", ["steps: ", "greater than or equal to 1"]),
        ("steps=2.5", ["steps: ", "2.5"]),
        ("rollout.max_off_policy_steps=2", ["rollout.max_off_policy_steps: "]),
        ("name=a b", ["name: 'a b'"]),
        ("packing.tokens_per_row=128", ["packing.tokens_per_row: a row of 128 tokens", "engine.max_model_len 256"]),
        ("rollout.max_tokens=256", ["rollout.max_tokens: 256 leaves no room for a prompt"]),
        ("engine.max_model_len=1024", ["engine.max_model_len: 1024 is longer than the model's", "512"]),
        ("environments.0.taskset.id=no_such_place", ["taskset 'no_such_place' is not installed", "pip install"]),
        ("environments.0.harness.id=no_such_harness", ["harness 'no_such_harness' is not installed"]),
        ("wandb.mode=online", ["wandb.mode is online", "WANDB_API_KEY", "offline"]),
    ],
)
def test_a_config_that_cannot_work(refused: Refused, model: str, override: str, words: list[str]) -> None:
    said = refused("run", "demo", model, override)
    assert all(word in said for word in words), said


def test_all_mistakes_are_told_at_once(refused: Refused) -> None:
    said = refused("run", "demo", "stepps=1", "seed=x")
    assert "2 problems" in said
    assert "stepps" in said
    assert "seed" in said


def test_names_and_stores_are_text_whatever_they_look_like(place: Path, model: str) -> None:
    config = prepare("train", ["demo"], [model], name="2024", store="true", seed=3)
    assert (config.name, config.store, config.seed) == ("2024", "true", 3)


def test_a_model_directory_that_is_not_there(refused: Refused) -> None:
    assert "model.path: there is no directory ./none" in refused("run", "demo", "model.path=./none")


def test_no_model_at_all(refused: Refused) -> None:
    assert "model.path: say which directory" in refused("run", "demo")


def test_a_hub_id_that_cannot_be_had(refused: Refused) -> None:
    assert "nobody/nothing is no directory, and no model" in refused("run", "demo", "model.path=nobody/nothing")


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
    assert words in said
    assert str(directory) in said


def test_an_environment_that_is_installed_and_does_not_load(refused: Refused, model: str) -> None:
    said = refused("run", "demo", model, "environments.0.taskset.length_of_beard=3")
    assert "environment 'reverse_text' (taskset 'reverse_text') cannot be loaded" in said
    assert "length_of_beard" in said


def test_an_environment_that_does_not_import(
    refused: Refused, model: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "broken_place.py").write_text("import a_package_that_is_not_here\n")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", f"{place}:{ROOT}")
    said = refused("run", "demo", model, 'environments.0.taskset={id="broken_place"}')
    assert "does not import: module 'a_package_that_is_not_here' is missing" in said


def test_an_engine_of_others_that_does_not_answer(refused: Refused, model: str) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    said = refused("run", "demo", model, f"engine.url={url}", "engine.startup_seconds=0.2")
    assert f"service 'engine' at {url} is not ready after 0.2 s" in said
    assert "check that it runs" in said


def test_an_environment_server_of_others_that_does_not_answer(
    refused: Refused, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.service.EXTERNAL_SECONDS", 0.2)
    address = f"tcp://127.0.0.1:{closed_port()}"
    said = refused("run", "demo", model, f"environments.0.address={address}")
    assert f"service 'environment reverse_text' at {address} is not ready" in said


def test_a_prefect_api_that_does_not_answer(refused: Refused, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{closed_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    said = refused("run", "demo", model)
    assert f"the Prefect API at {url} does not answer" in said
    assert "unset PREFECT_API_URL" in said


def demonstrations(place: Path, *rows: object) -> str:
    """Write a JSONL file and return the override that names it."""
    path = place / "demonstrations.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return f"data.path={path}"


GOOD = {"prompt": "ab", "completion": "ba"}
TALK = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD, {"prompt": "cd"}], "row 1 (the first is 0): needs `messages`, or `prompt` and `completion`; it has p"),
        (
            [GOOD] * 150 + [{"question": "?"}],
            "row 150 (the first is 0): needs `messages`, or `prompt` and `completion`",
        ),
        ([{"text": "x"}], "row 0 (the first is 0): needs `messages`, or `prompt` and `completion`; it has text"),
        ([TALK, {"messages": []}], "row 1 (the first is 0)"),
        ([], "demonstrations.jsonl is empty"),
        (["not json"], "cannot be read as a JSONL file"),
    ],
)
def test_demonstrations_that_are_none(
    refused: Refused, model: str, place: Path, rows: list[object], words: str
) -> None:
    said = refused("sft", model, demonstrations(place, *rows))
    assert words in said
    assert "demonstrations.jsonl" in said
    assert "Mend the file" in said


def test_rows_of_both_kinds_are_good(place: Path, model: str) -> None:
    prepare("sft", [], [model, demonstrations(place, *[GOOD] * 150, TALK)])


def test_a_file_of_demonstrations_that_is_not_there(refused: Refused, model: str) -> None:
    assert "data.path: there is no file ./none.jsonl" in refused("sft", model, "data.path=./none.jsonl")


def test_a_parquet_file_that_is_none(refused: Refused, model: str, place: Path) -> None:
    (place / "rows.parquet").write_text("no")
    assert "cannot be read as a Parquet file" in refused("sft", model, "data.path=rows.parquet")


def test_samples_that_no_row_can_hold(refused: Refused, model: str, place: Path) -> None:
    said = refused("sft", model, demonstrations(place, GOOD), "packing.tokens_per_row=255")
    assert "packing.tokens_per_row: a row of 255 tokens cannot hold the longest sample, data.max_length 256" in said


def test_a_file_of_settings_that_is_not_there(refused: Refused) -> None:
    said = refused("run", "dmeo")
    assert "dmeo: no such file, and no such preset; the presets are demo" in said


def record(place: Path, config: RunConfig) -> None:
    """Write down that a run has begun."""
    open_store(place / "stagecoach-store").runs.record(
        run=config.name, event="started", kind=config.kind, config=config.model_dump(mode="json")
    )


def test_a_name_that_has_another_config(refused: Refused, model: str, place: Path) -> None:
    record(place, prepare("train", ["demo"], [model], name="taken", seed=1))
    said = refused("run", "demo", model, "--name", "taken", "training.learning_rate=1", "assignment.group_size=4")
    assert "training.learning_rate: 0.0003 is recorded, 1.0 is asked for" in said
    assert "assignment.group_size: 16 is recorded, 4 is asked for" in said
    assert "give the branch a name of its own (--name)" in said
    assert open_store(place / "stagecoach-store").runs.config("taken")["assignment"]["group_size"] == 16


@pytest.mark.parametrize("command", ["resume", "show"])
def test_a_run_that_nobody_knows(refused: Refused, model: str, place: Path, command: str) -> None:
    record(place, prepare("train", ["demo"], [model], name="known", seed=1))
    said = refused(command, "unknown")
    assert "there is no run 'unknown'" in said
    assert "the last runs are: known" in said


def test_resuming_in_a_store_without_runs(refused: Refused) -> None:
    assert "holds no run yet" in refused("resume")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("ghost", "there is no policy 'ghost': run 'ghost' has made no policy"),
        ("known:7", "there is no policy 'known:7'"),
        ("known:last", "there is no policy 'known:last'"),
    ],
)
def test_a_policy_that_nobody_made(refused: Refused, model: str, place: Path, policy: str, words: str) -> None:
    record(place, prepare("train", ["demo"], [model], name="known", seed=1))
    said = refused("eval", "demo", "--policy", policy)
    assert words in said
    assert "the last runs in" in said


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("format.json", '{"layout": 2}', "the store has layout 2, this version of the program reads layout 1"),
        ("thesis.tex", "...", "this is not a store: there is no format.json, but there are thesis.tex"),
    ],
)
@pytest.mark.parametrize("command", ["run", "resume", "show", "maintain"])
def test_a_root_that_is_no_store_of_ours(
    refused: Refused, model: str, place: Path, name: str, text: str, words: str, command: str
) -> None:
    root = place / "other"
    root.mkdir()
    (root / name).write_text(text)
    said = refused(command, *(["demo", model] if command == "run" else []), "--store", str(root))
    assert words in said
    assert str(root) in said
    assert [path.name for path in root.iterdir()] == [name]


def test_a_store_where_nothing_can_be_made(refused: Refused, model: str, place: Path) -> None:
    (place / "file").write_text("")
    said = refused("run", "demo", model, "--store", str(place / "file" / "store"))
    assert str(place / "file" / "store") in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"only root may mount a small disk: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_disk_without_room_for_a_step(refused: Refused, model: str, small_disk: Path) -> None:
    said = refused("run", "demo", model, "--store", str(small_disk / "store"))
    assert "the disk is full: 1 MiB are free" in said
    assert "make room there" in said
    assert open_store(small_disk / "store").runs.names() == []


def test_a_disk_that_is_full_to_the_last_byte(refused: Refused, model: str, small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    (small_disk / "store").mkdir()
    said = refused("run", "demo", model, "--store", str(small_disk / "store"))
    assert "no space left" in said.lower()
    assert "free some space" in said
    (small_disk / "filler").unlink()
    assert open_store(small_disk / "store").runs.names() == []


def test_the_command_itself_ends_with_status_2(place: Path) -> None:
    """Once as a process, as people call it."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "demo", "model.path=./none"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(place)},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("stagecoach: The config has a problem; nothing was started.\n  model.path: there is")
