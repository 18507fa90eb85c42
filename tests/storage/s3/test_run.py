"""A whole training run with its store in S3: killed, gone on with, and beside another run in the same store.

Its model sees: each group of rollouts shows a picture, whose tensors go the way of all tables.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from storage.store import Store, open_store
from tasks.learner.tiny_vision import tiny_qwen3_vl
from tests.fixtures import fixed
from tests.fixtures.driving import ROOT, SECONDS, SETTINGS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
SEEING = (
    f"environments.0.name={fixed.ENVIRONMENT}",
    'environments.0.taskset={id="sample_reverse_text"}',
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen3_vl(tmp_path_factory.mktemp("s3-model") / "tiny", seed=3)


class Runs:
    """Runs over one store, each in a process and a directory of its own."""

    def __init__(self, directory: Path, url: str, model: Path) -> None:
        self.directory, self.url, self.model = directory, url, model

    def begin(self, name: str, kill: str = "") -> "subprocess.Popen[str]":
        """Start a run, or go on with it."""
        mine = self.directory / name
        mine.mkdir(exist_ok=True)
        request = {
            "overrides": [*SETTINGS, f"model.path={self.model}", *SEEING],
            "kill": kill,
            "stop": "",
            "name": name,
        }
        request |= {"prefect": False, "backwards": False, "replays": [], "store": self.url, "preset": "looking"}
        command = [sys.executable, "-P", "-m", "tests.fixtures.dying_run", str(mine), json.dumps(request)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
        environment |= {"TMPDIR": str(mine)}  # its own local copies of policies, as on another machine
        return subprocess.Popen(
            command, cwd=mine, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def live(self, name: str, kill: str = "") -> tuple[int, str]:
        """Start a run and wait for its end; return its status and what it said."""
        life = self.begin(name, kill)
        output, _ = life.communicate(timeout=SECONDS)
        return life.returncode, output

    def outcome(self, name: str) -> Mapping[str, Any]:
        """What the last process of a run made."""
        found: Mapping[str, Any] = json.loads((self.directory / name / "outcome.json").read_text())
        return found


def finished(store: Store) -> set[tuple[str, str, int]]:
    return {(entry.run, entry.stage, entry.step) for entry in store.ledger.entries() if entry.part == ""}


@pytest.mark.nightly
def test_a_run_survives_a_kill_and_another_run_beside_it(s3_root, tmp_path, model):
    runs = Runs(tmp_path, s3_root, model)
    status, output = runs.live("one", "after commit rollout 0 part #2")
    assert status == -9, output
    killed = open_store(s3_root)
    before = {entry.key: entry.attempt for entry in killed.ledger.entries() if not entry.part}
    assert before, "something was finished, or the test shows nothing"
    parts = [entry for entry in killed.ledger.entries() if entry.stage == "rollout" and entry.part]
    safe = [killed.read(part.slices("image_tensors"), ["group_id"])["group_id"].to_pylist() for part in parts]
    assert [len({*each}) for each in safe] == [1, 1], "two groups of three are safe, with their picture's tensors"

    lives = {name: runs.begin(name) for name in ("one", "two")}
    for life in lives.values():
        told, _ = life.communicate(timeout=SECONDS)
        assert life.returncode == 0, told

    store = open_store(s3_root)
    entries = store.ledger.entries()
    assert {entry.attempt for entry in entries if entry.key in before} == set(before.values()), "nothing done twice"
    assert all(part in entries for part in parts), "what was safe is a part of what came of it"
    assert {(stage, step) for run, stage, step in finished(store) if run == "one"} == {
        (stage, step) for run, stage, step in finished(store) if run == "two"
    }
    assert len({(entry.run, entry.key, entry.part) for entry in entries}) == len(entries)
    tables = ("images", "image_tensors", "batch_images")
    for table in (*tables, "traces", "verdicts", "samples", "batches", "updates"):
        counted = store.counted_entries()  # two runs that sample a group at once have a part each
        slices = list(dict.fromkeys(piece for entry in counted for piece in entry.slices(table)))
        assert store.read(slices).num_rows == store.scan(table).collect().height > 0
    sampled = [entry for entry in entries if (entry.run, entry.stage, entry.part) == ("one", "rollout", "")]
    for table, columns in (("images", ["group_id"]), ("image_tensors", ["group_id", "name"])):
        rows = store.read([piece for entry in sampled for piece in entry.slices(table)], columns).to_pylist()
        assert len(rows) == len({tuple(row.values()) for row in rows}) == 6 * len(columns), "six groups, each once"
    for key in store.policies.names():
        store.policies.directory(key, verify=True)
    assert len(store.policies.names()) == 3, "the first, and one of each step, shared by both runs"

    status, output = runs.live("one")
    assert status == 0, output
    again = runs.outcome("one")
    assert again["num_computed"] == 0
    assert again["num_found"] > 10
    assert open_store(s3_root).ledger.entries() == entries
