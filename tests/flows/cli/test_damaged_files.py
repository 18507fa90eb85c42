"""A damaged file of a store ends in one message that names it, whichever command meets it, or changes nothing."""

import itertools
import random

import pytest

from flows import cli
from storage.delta.log import CHECKPOINT
from storage.policies.manifest import MANIFEST
from storage.store import open_store
from tests.fixtures.faults import spoil
from tests.fixtures.histories import train
from tests.fixtures.rehearsal import play_stages, rehearse

pytestmark = pytest.mark.engine  # it takes minutes


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store with two runs of every table, and one with weights."""
    place = tmp_path_factory.mktemp("damaged") / "store"
    with play_stages():
        rehearse(place, "base")
        rehearse(place, "other", seed=5)
    train(open_store(place), "weights", "xy")
    return place


def flip(near_the_end, seed):
    def harm(data):
        place = random.Random(seed).randrange(min(len(data), 500) if near_the_end else len(data))
        damaged = bytearray(data)
        damaged[-1 - place if near_the_end else place] ^= 8
        return bytes(damaged)

    return harm


HARMS = {
    "half": lambda data: data[: len(data) // 2],
    "no text": lambda data: b"{\xff",
    "other JSON": lambda data: b"[7]",
    "random": lambda data: random.Random(3).randbytes(len(data)),
    "a bit": flip(False, 1),
    "a bit of the footer": flip(True, 2),
    "missing": lambda data: None,
}
READING = [
    "runs",
    "show base",
    "sql select_count(*),_max(reward)_from_traces",
    "sql select_*_from_messages",
    "sql select_*_from_ledger",
    "traces base",
    "view --save /runs/base run.html --force",
    "diff base other",
    "export base --format sft --to rows.jsonl --force",
    "export weights --format weights --to model --force",
    "repair --dry-run --deep",
]
CHANGING = ["maintain --retention-hours 0", "gc --keep base --policies last --yes", "repair --deep"]
STARTING = ["replay base --set algorithm.type=rloo", "resume base"]


def data_file(table):
    return lambda root: root / "tables" / table / open_store(root).table(table).active_files()[-1].path


def log_file(table, ending):
    return lambda root: max((root / "tables" / table / "_delta_log").glob(f"*{ending}"))


TARGETS = {
    "ledger": data_file("ledger"),
    "runs": data_file("runs"),
    "traces": data_file("traces"),
    "messages": data_file("messages"),
    "metrics": data_file("metrics"),
    "commit of the ledger": log_file("ledger", ".json"),
    "checkpoint of the ledger": log_file("ledger", CHECKPOINT),
    "pointer of the ledger": log_file("ledger", "_last_checkpoint"),
    "head of the ledger": lambda root: root / "heads/ledger.json",
    "manifest": lambda root: root / "policies/training-xy" / MANIFEST,
    "weights": lambda root: root / "policies/training-xy/model.safetensors",
}
IN_CI = {*((target, "half") for target in TARGETS), *(("ledger", harm) for harm in HARMS)}
CASES = [
    pytest.param(*case, marks=() if case in IN_CI else pytest.mark.nightly)
    for case in itertools.product(TARGETS, HARMS)
]


def words(command):
    return [word.replace("_", " ") if word.startswith("select") else word for word in command.split()]


@pytest.mark.fault(
    "files",
    "a file of a store is damaged",
    "each of 16 commands ends in one message that names the file, or is not touched by it",
)
@pytest.mark.parametrize(("target", "harm"), CASES)
def test_each_command_ends_in_one_message(root, capsys, target, harm):
    path = TARGETS[target](root)
    spoil(path, HARMS[harm](path.read_bytes()))
    said = {}
    for command in (*READING, *CHANGING):
        status = cli.main([*words(command), "--store", str(root)])
        told = capsys.readouterr()
        assert status in (0, 1, 2) and "Traceback" not in told.err
        if status and "there is no policy" not in told.err:
            said[command] = told.err + told.out
    table = path.parent.parent.name
    # The last is a cell of a report.
    names = (path.name, path.parent.name, f"{table}/", f"table {table!r}", f"{table}\t")
    for command, text in said.items():
        assert any(name in text for name in names), f"{command} does not say which file: {text}"
    # A pointer or a head that is gone says nothing, and a bit may be flipped in a word that nobody reads.
    harmless = harm.startswith("a bit") or (target.startswith(("pointer", "head")) and harm == "missing")
    assert harmless or "repair --dry-run --deep" in said
    if "show base" in said and target in ("ledger", "runs"):
        for command in STARTING:
            assert cli.main([*words(command), "--store", str(root)]) == 2
            told = capsys.readouterr()
            assert "Traceback" not in told.err and any(name in told.err for name in (*names, "nothing was started"))
