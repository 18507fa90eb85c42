"""Data, names and places that cannot be used: one clear message and status 2, with nothing started or recorded."""

import json
import subprocess
from collections.abc import Callable

import pytest

from flows.runtime.resolve_run import resolve_run
from storage.store import open_store

Refused = Callable[..., str]
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
NEEDS = "needs `messages`, or `prompt` and `completion`"
ROWS, DATA = "rows that are no demonstrations", "a file of data that cannot be used"
POLICY, ROOT = "a policy that nobody made", "a directory that is no store of ours"
OLD = "the store has layout 1, this version of the program reads layout 2"
THESIS = "this is not a store: there is no format.json, but there are thesis.tex"
REFUSALS: list[tuple[str, str, tuple[str, ...]]] = [
    (ROWS, "sft MODEL data.path=half.jsonl", (f"row 1 (the first is 0): {NEEDS}; it has p", "Mend the file")),
    (ROWS, "sft MODEL data.path=late.jsonl", (f"row 150 (the first is 0): {NEEDS}", "late.jsonl", "Mend the file")),
    (ROWS, "sft MODEL data.path=text.jsonl", (f"row 0 (the first is 0): {NEEDS}; it has text", "Mend the file")),
    (ROWS, "sft MODEL data.path=silent.jsonl", ("row 1 (the first is 0)", "silent.jsonl", "Mend the file")),
    (ROWS, "sft MODEL data.path=empty.jsonl", ("empty.jsonl is empty", "Mend the file")),
    (ROWS, "sft MODEL data.path=words.jsonl", ("cannot be read as a JSONL file", "words.jsonl", "Mend the file")),
    (ROWS, "sft MODEL data.path=broken.jsonl", ("cannot be read as a JSONL file", "Mend the file")),
    (DATA, "sft MODEL data.path=./none.jsonl", ("data.path: there is no file ./none.jsonl",)),
    (DATA, "sft MODEL data.path=rows.parquet", ("cannot be read as a Parquet file",)),
    (
        DATA,
        "sft MODEL data.path=good.jsonl packing.tokens_per_row=255",
        ("packing.tokens_per_row: a row of 255 tokens cannot hold the longest sample, data.max_length 256",),
    ),
    ("a name of no preset", "run dmeo", ("dmeo: no such file, and no such preset; the presets are ", "debate, demo, ")),
    (
        "the name of a run with another config",
        "run demo MODEL --name known training.learning_rate=1 assignment.group_size=4",
        (
            "training.learning_rate: 0.0003 is recorded, 1.0 is asked for",
            "assignment.group_size: 16 is recorded, 4 is asked for",
            "give the branch a name of its own (--name)",
        ),
    ),
    *(
        ("a run that nobody knows", f"{command} unknown", ("there is no run 'unknown'", "the nearest runs are: known"))
        for command in ("resume", "show")
    ),
    ("a store without runs", "resume", ("holds no run yet",)),
    (
        POLICY,
        "eval demo --policy ghost --name unknown",
        ("there is no policy 'ghost': run 'ghost' has made no policy", "the last runs in"),
    ),
    (POLICY, "eval demo --policy known:7", ("there is no policy 'known:7'", "the last runs in")),
    (POLICY, "eval demo --policy known:last", ("there is no policy 'known:last'", "the last runs in")),
    *(
        (ROOT, f"{command} --store {root}", (words, root))
        for root, words in (("old", OLD), ("thesis", THESIS))
        for command in ("run demo MODEL", "resume", "show", "maintain")
    ),
    ("a store where nothing can be made", "run demo MODEL --store file/store", ("file/store",)),
]
"""What is wrong, the command, and words of its message; a run `known` is recorded where the command names it."""


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
    assert [[path.name for path in (place / name).iterdir()] for name in ("old", "thesis")] == [
        ["format.json"],
        ["thesis.tex"],
    ]


def test_rows_of_both_kinds_are_good(place, model):
    (place / "both.jsonl").write_text(FILES["both.jsonl"])
    resolve_run("sft", [], [model, "data.path=both.jsonl"])


@pytest.fixture
def small_disk(tmp_path):
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
