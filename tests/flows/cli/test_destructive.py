"""Commands that delete or write refuse numbers, places and stores with which they would destroy something."""

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest

from flows import cli
from storage.delta.log import CHECKPOINT, head_path
from storage.errors import StoreError
from storage.maintenance.sweep import drop_slices, finish_removals
from storage.policies.manifest import MANIFEST
from storage.policies.store import Policies
from storage.refs import File, Slice
from storage.roots import open_root
from storage.store import open_store
from tests.fixtures.commands import file_bytes
from tests.fixtures.faults import happened, spoil
from tests.fixtures.histories import finish, two_runs


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store with two finished runs that share a step."""
    return two_runs(tmp_path_factory.mktemp("destructive") / "store")


NUMBERS = tomllib.loads(Path(__file__).with_name("cases.toml").read_text("utf-8"))["numbers"]
HUGE = "1" * 40
ABSURD = [
    ["sql", "update extensions"],
    ["sql", "select '\ud800'"],
    ["lineage", f"old:{HUGE}"],
    ["lineage", f"old:1:{HUGE}"],
    ["lineage", f"old:{HUGE * 200}"],
    ["lineage", f"a/{HUGE}"],
    ["trace", HUGE],
    ["trace", "x", "--messages", f"{HUGE * 200}:"],
    ["why", HUGE * 200],
    ["export", "--policy", f"old:{HUGE}", "--format", "weights", "--to", "weights"],
    ["view", "--save", f"/runs/old/steps/{HUGE}", "page.html"],
    ["replay", "old", "--set", f"steps={HUGE * 200}"],
    ["replay", "old", "--set", f"training.learning_rate={HUGE * 200}"],
    *(f"{command}={value}".split() for command, values in NUMBERS.items() for value in values),
]


@pytest.mark.fault("input", "a number that a command cannot take, absurd arguments", "one message, nothing changed")
@pytest.mark.parametrize("argv", ABSURD, ids=lambda argv: " ".join(argv)[:60].encode("ascii", "replace").decode())
def test_an_absurd_argument_is_one_message(root, tmp_path, monkeypatch, call, argv):
    monkeypatch.chdir(tmp_path)
    before = file_bytes(tmp_path)
    status, message = call(*argv)
    assert status == 2 and message.startswith("stagecoach: ") and "Traceback" not in message
    assert file_bytes(tmp_path) == before


@pytest.mark.fault("input", "the flow is to keep -1 runs", "refused")
def test_the_flow_refuses_to_keep_a_negative_number_of_runs(root):
    from flows.runtime.maintenance import choose_removal

    with pytest.raises(StoreError, match="-1 runs cannot be kept") as refused:
        choose_removal(open_store(root), [], -1, [], [], "all")
    happened(refused.value)


OUTPUTS = [
    ["sql", "select 1 as one", "--output"],
    ["view", "--save", "/"],
    ["export", "old", "--format", "weights", "--to"],
    ["export", "old", "--format", "sft", "--to"],
]


@pytest.mark.fault("paths", "a command is to write into a store", "refused, nothing changed")
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("argv", OUTPUTS, ids=" ".join)
@pytest.mark.parametrize("target", ["format.json", "new.json", "policies/training-x", "tables/../x.json", "link"])
def test_nothing_is_written_into_a_store(root, call, argv, target, force):
    path = root / target
    if target == "link":
        path = root.parent / "link"
        path.symlink_to(root / "policies")
        path = path / "new.json"
    before = file_bytes(root)
    status, said = call(*argv, str(path), *(["--force"] if force else []))
    assert status == 2 and ("inside the store" in said or "Not a directory" in said)
    assert file_bytes(root) == before


@pytest.mark.fault("paths", "a command is to replace a file", "only with --force, and whole")
@pytest.mark.parametrize("argv", OUTPUTS[:2], ids=" ".join)
def test_a_file_is_replaced_only_when_asked_and_whole(root, tmp_path, call, argv):
    target = tmp_path / "there.json"
    target.write_text("precious")
    status, said = call(*argv, str(target))
    assert status == 2 and "--force" in said and target.read_text() == "precious"
    assert call(*argv, str(target), "--force")[0] == 0
    assert target.read_text() != "precious"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_stream_is_written_to(root, tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe.json")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    given = ["--output", str(pipe), "--store", str(root)]
    assert cli.main(["sql", "select 1 as one", *given]) == 0
    assert os.read(reader, 100) == b'[{"one": 1}]\n'
    os.close(reader)


def ledger(root, ending):
    return max((root / "tables/ledger/_delta_log").glob(f"*{ending}"))


DAMAGE = {
    "no log": lambda root: shutil.rmtree(root / "tables/ledger/_delta_log"),
    "no table": lambda root: shutil.rmtree(root / "tables/ledger"),
    "newest commit missing": lambda root: ledger(root, ".json").unlink(),
    "newest commit cut": lambda root: ledger(root, ".json").write_bytes(ledger(root, ".json").read_bytes()[:90]),
    "newest commit altered": lambda root: flip(ledger(root, ".json")),
    "checkpoint altered": lambda root: flip(ledger(root, CHECKPOINT)),
    "head altered": lambda root: flip(root / head_path("ledger")),
    "a data file missing": lambda root: next((root / "tables/ledger/run=old").glob("*.parquet")).unlink(),
    "all data files damaged": lambda root: [flip(path) for path in (root / "tables/ledger").rglob("*.parquet")],
    "repair under way": lambda root: begin_repair(root),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    spoil(path, bytes(data))


def begin_repair(root):
    (root / "quarantine").mkdir()
    (root / "quarantine/unfinished.json").write_text(json.dumps({"place": "quarantine/x", "damages": []}))


@pytest.mark.fault("log", "gc or maintain on a store with a damaged ledger", "refused, nothing deleted")
@pytest.mark.parametrize("command", ["gc --keep new --yes", "maintain --retention-hours 0"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_nothing_is_deleted_while_the_ledger_is_damaged_or_incomplete(root, call, command, damage):
    for _ in range(6):
        finish(open_store(root), "new")  # events do not hide what happens to the ledger
    damage(root)
    before = file_bytes(root)
    status, said = call(*command.split())
    assert status == 2 and ("ledger" in said or "repair" in said)
    assert "Traceback" not in said
    assert file_bytes(root) == before


OUT = "../../weights"


@pytest.fixture
def outside(root):
    """A file beside the store, which a path out of it would reach."""
    path = root.parent / "precious.parquet"
    path.write_text("precious")
    return path


@pytest.mark.fault("paths", "a ledger row names a file outside the store", "refused, nothing deleted")
def test_rows_that_name_a_file_outside_delete_nothing_there(root, outside):
    store = open_store(root)
    file = File("../../../precious.parquet", 8, "")
    piece = Slice("messages", "old", "a", 1, "", (file,))
    with pytest.raises(StoreError, match="leads out of the store"):
        drop_slices(store, [piece])
    with pytest.raises(StoreError, match="leads out of the store"):
        store.slices.read_stored(piece)
    assert outside.read_text() == "precious"
    happened(file)


@pytest.mark.fault("paths", "a removal names a place outside the store", "refused, nothing deleted")
@pytest.mark.parametrize("what", ["slices", "policies"])
def test_removals_that_name_a_place_outside_delete_nothing_there(root, outside, what):
    (root.parent / "weights").mkdir()
    piece = Slice("messages", "old", "a", 1, "", (File("../../../precious.parquet", 8, ""),))
    record = {"slices": [piece.to_row()], "policies": []} if what == "slices" else {"slices": [], "policies": [OUT]}
    (root / "removals").mkdir(exist_ok=True)
    (root / "removals/0.json").write_text(json.dumps(record))
    happened(record)
    with pytest.raises(StoreError):
        finish_removals(open_store(root))
    assert outside.read_text() == "precious" and (root.parent / "weights").is_dir()
    with pytest.raises(StoreError, match="no policy key"):
        open_store(root).policies.remove(OUT)


@pytest.mark.fault("paths", "a manifest names a place outside the store", "refused")
@pytest.mark.parametrize("field", ["files", "below", "added"])
def test_a_manifest_that_names_a_place_outside_is_refused(tmp_path, field):
    policies = Policies(open_root(str(tmp_path)), cache=tmp_path / "cache")
    scratch = policies.scratch("k")
    (scratch / "model.safetensors").write_text("weights")
    policies.publish(scratch, "k")
    path = tmp_path / "policies/k" / MANIFEST
    content = json.loads(path.read_text())
    content.pop("digest")
    if field == "files":
        content["files"][0]["path"] = "../../../precious.parquet"
    else:
        content[field] = "/../../.." if field == "below" else {"model.safetensors": "/../../.."}
    spoil(path, json.dumps(content).encode())
    with pytest.raises(StoreError, match="leads out of the store"):
        policies.directory("k")


@pytest.mark.fault("paths", "a path leads out of the store", "each of ten uses is refused")
@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", "a/..", "a\0b", "..\\x"])
def test_no_path_leads_out_of_a_root(tmp_path, path):
    (tmp_path / "store").mkdir()
    root = open_root(str(tmp_path / "store"))
    happened(repr(path))
    uses = [(use, b"") for use in (root.write, root.create, root.replace)]
    others = (root.read, root.delete, root.remove_unneeded, root.exists, root.names, root.file_sizes, root.writer)
    for use, *content in [*uses, *((use,) for use in others)]:
        with pytest.raises(StoreError, match="leads out of the store"):
            use(path, *content)
