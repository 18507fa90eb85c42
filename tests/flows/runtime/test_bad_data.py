"""Data, names and places that cannot be used: one clear message and status 2, with nothing started or recorded."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.runtime.resolve_run import resolve_run
from storage.store import open_store

Refused = Callable[..., str]


def demonstrations(place: Path, *rows: object) -> str:
    """Write a JSONL file and return the override that names it."""
    path = place / "demonstrations.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return f"data.path={path}"


GOOD = {"prompt": "ab", "completion": "ba"}
TALK = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]}


@pytest.mark.fault("input", "rows that are no demonstrations", "one message with the row; nothing started")
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
        (['{"content": [}'], "cannot be read as a JSONL file"),
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
    resolve_run("sft", [], [model, demonstrations(place, *[GOOD] * 150, TALK)])


@pytest.mark.fault("input", "a file of data that cannot be used", "one message; nothing started")
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.path=./none.jsonl"], "data.path: there is no file ./none.jsonl"),
        (["data.path=rows.parquet"], "cannot be read as a Parquet file"),
        (
            ["data.path=demonstrations.jsonl", "packing.tokens_per_row=255"],
            "packing.tokens_per_row: a row of 255 tokens cannot hold the longest sample, data.max_length 256",
        ),
    ],
)
def test_files_and_rows_of_them_that_cannot_be_used(
    refused: Refused, model: str, place: Path, overrides: list[str], words: str
) -> None:
    (place / "rows.parquet").write_text("no")
    demonstrations(place, GOOD)
    assert words in refused("sft", model, *overrides)


def test_a_file_of_settings_that_is_not_there(refused: Refused) -> None:
    said = refused("run", "dmeo")
    assert "dmeo: no such file, and no such preset; the presets are " in said
    assert "calc_tools, debate, demo, " in said


def record(place: Path, config: RunConfig) -> None:
    """Write down that a run has begun."""
    open_store(place / "stagecoach-store").runs.record(
        run=config.name, event="started", kind=config.kind, config=config.model_dump(mode="json")
    )


@pytest.mark.fault(
    "input", "the name of a run with another config", "one message with each difference; nothing started"
)
def test_a_name_that_has_another_config(refused: Refused, model: str, place: Path) -> None:
    record(place, resolve_run("train", ["demo"], [model], name="taken", seed=1))
    said = refused("run", "demo", model, "--name", "taken", "training.learning_rate=1", "assignment.group_size=4")
    assert "training.learning_rate: 0.0003 is recorded, 1.0 is asked for" in said
    assert "assignment.group_size: 16 is recorded, 4 is asked for" in said
    assert "give the branch a name of its own (--name)" in said
    assert open_store(place / "stagecoach-store").runs.config("taken")["assignment"]["group_size"] == 16


@pytest.mark.parametrize("command", ["resume", "show"])
def test_a_run_that_nobody_knows(refused: Refused, model: str, place: Path, command: str) -> None:
    record(place, resolve_run("train", ["demo"], [model], name="known", seed=1))
    said = refused(command, "unknown")
    assert "there is no run 'unknown'" in said
    assert "the nearest runs are: known" in said


def test_resuming_in_a_store_without_runs(refused: Refused) -> None:
    assert "holds no run yet" in refused("resume")


@pytest.mark.fault("input", "a policy that nobody made", "one message; nothing started")
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("ghost", "there is no policy 'ghost': run 'ghost' has made no policy"),
        ("known:7", "there is no policy 'known:7'"),
        ("known:last", "there is no policy 'known:last'"),
    ],
)
def test_a_policy_that_nobody_made(refused: Refused, model: str, place: Path, policy: str, words: str) -> None:
    record(place, resolve_run("train", ["demo"], [model], name="known", seed=1))
    said = refused("eval", "demo", "--policy", policy)
    assert words in said
    assert "the last runs in" in said


@pytest.mark.fault("input", "a directory that is no store of ours", "refused and left alone")
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("format.json", '{"layout": 1}', "the store has layout 1, this version of the program reads layout 2"),
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


@pytest.mark.fault("disk", "a store where nothing can be made", "one message; nothing started")
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


@pytest.mark.fault("disk", "a disk without room for a step", "one message; nothing started")
def test_a_disk_without_room_for_a_step(refused: Refused, model: str, small_disk: Path) -> None:
    said = refused("run", "demo", model, "--store", str(small_disk / "store"))
    assert "the disk has no room for the weights of this run: " in said
    assert "make room there" in said
    assert open_store(small_disk / "store").runs.names() == []


@pytest.mark.fault("disk", "a disk that is full to the last byte", "one message; nothing started")
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
