"""Data, names and places that cannot be used: one clear message and status 2, with nothing started or recorded."""

import json
import tomllib
from pathlib import Path

import pytest

from flows.runtime.resolve_run import resolve_run
from storage.store import open_store
from tests.fixtures.small_disks import mounted

GOOD = json.dumps({"prompt": "ab", "completion": "ba"})
TALK = json.dumps({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]})
FILES = {
    "good.jsonl": GOOD,
    "half.jsonl": f'{GOOD}\n{{"prompt": "cd"}}',
    "late.jsonl": f"{GOOD}\n" * 150 + '{"question": "?"}',
    "text.jsonl": '{"text": "x"}',
    "silent.jsonl": f'{TALK}\n{{"messages": []}}',
    "empty.jsonl": "",
    "words.jsonl": "not json",
    "broken.jsonl": '{"content": [}',
    "both.jsonl": f"{GOOD}\n" * 150 + TALK,
    "rows.parquet": "no",
    "file": "",
    "old/format.json": '{"layout": 1}',
    "thesis/thesis.tex": "...",
}
GROUPS = tomllib.loads((Path(__file__).parent / "refusals.toml").read_text(encoding="utf-8"))["group"]
REFUSALS = [(group["what"], case["command"], case["says"]) for group in GROUPS for case in group["cases"]]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(command, words, marks=pytest.mark.fault("input", what, "one message; nothing started"), id=command)
        for what, command, words in REFUSALS
    ],
)
def test_what_cannot_be_used_is_refused(refused, model, place, command, words):
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    if "known" in command:
        config = resolve_run("train", ["demo"], [model], name="known", seed=1).model_dump(mode="json")
        open_store(place / "stagecoach-store").runs.record(run="known", event="started", kind="train", config=config)
    said = refused(*command.replace("MODEL", model).split())
    if "known" in command:
        assert [event.config for event in open_store(place / "stagecoach-store").runs.events("known")] == [config]
    assert [word for word in words if word not in said] == [], said
    assert {name: (place / name).read_text() for name in FILES} == FILES
    left = [[path.name for path in (place / name).iterdir()] for name in ("old", "thesis")]
    assert left == [["format.json"], ["thesis.tex"]]


def test_rows_of_both_kinds_are_good(place, model):
    (place / "both.jsonl").write_text(FILES["both.jsonl"])
    resolve_run("sft", [], [model, "data.path=both.jsonl"])


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of one MiB."""
    yield from mounted(tmp_path / "disk", "1m")


@pytest.mark.fault("disk", "a disk without room for a step", "one message; nothing started")
def test_a_disk_without_room_for_a_step(refused, model, small_disk):
    said = refused("run", "demo", model, "--store", str(small_disk / "store"))
    assert "the disk has no room for the weights of this run: " in said
    assert "make room there" in said
    assert open_store(small_disk / "store").runs.names() == []


@pytest.mark.fault("disk", "a disk that is full to the last byte", "one message; nothing started")
def test_a_disk_that_is_full_to_the_last_byte(refused, model, small_disk):
    with pytest.raises(OSError, match="No space left"), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    (small_disk / "store").mkdir()
    said = refused("run", "demo", model, "--store", str(small_disk / "store"))
    assert "no space left" in said.lower()
    assert "free some space" in said
    (small_disk / "filler").unlink()
    assert open_store(small_disk / "store").runs.names() == []
