"""Adapters of a supervised run in an object store: other machines go on with them, evaluate and export them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.policies.manifest import adapter_base
from storage.store import Store, open_store
from tasks.learner.digest import weights_sha256
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.driving import ROOT, SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]
RUN, SCORES = "adapted", "scores"
WORDS = ("abc", "bcd", "cab", "dab")


class Machine:
    """A directory that has no other's local copies of policies."""

    def __init__(self, directory: Path, store: str) -> None:
        directory.mkdir()
        self.directory, self.store = directory, store

    def call(self, *arguments: str) -> None:
        """Call the command line over the store; what it says is seen where it fails."""
        command = [sys.executable, "-P", "-m", "flows.cli", *arguments, "--store", self.store]
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "TMPDIR": str(self.directory)}
        done = subprocess.run(
            command, cwd=self.directory, env=variables, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr


def learn(machine: Machine, model: Path, demonstrations: Path, steps: int) -> None:
    """Train adapters on the demonstrations, or go on with it."""
    settings = [f"model.path={model}", f"data.path={demonstrations}", f"steps={steps}", "seed=7"]
    settings += ["training.lora={rank=4, alpha=16}", "assignment.groups_per_step=16", "packing.updates_per_step=2"]
    machine.call("sft", "sft_demo", *settings, "packing.tokens_per_row=256", "--name", RUN)


def policies(store: Store) -> dict[int, tuple[str, str]]:
    """Return key and digest of the policies by version."""
    rows = store.scan("policies").select("version", "policy_key", "weights_sha256").collect().rows()
    return {version: (key, digest) for version, key, digest in rows}


def test_each_machine_has_them_from_the_bucket(s3_root, tmp_path):
    model, demonstrations = tiny_qwen3(tmp_path / "model", seed=3), tmp_path / "demonstrations.jsonl"
    rows = [{"prompt": f"Reverse: {word}", "completion": word[::-1]} for word in WORDS]
    demonstrations.write_text("\n".join(map(json.dumps, rows * 8)))
    learn(Machine(tmp_path / "first", s3_root), model, demonstrations, steps=1)
    learn(Machine(tmp_path / "second", s3_root), model, demonstrations, steps=2)
    undisturbed = str(tmp_path / "store")
    learn(Machine(tmp_path / "alone", undisturbed), model, demonstrations, steps=2)

    store = open_store(s3_root)
    found = policies(store)
    assert found == policies(open_store(undisturbed)), "with the optimizer's state that lay in the bucket"
    assert len({digest for _, digest in found.values()}) == 3
    base, *adapted = [store.policies.directory(found[version][0], verify=True) for version in range(3)]
    assert weights_sha256(base) == weights_sha256(model)
    assert {adapter_base(each) for each in adapted} == {found[0][0]}

    third = Machine(tmp_path / "third", s3_root)
    third.call("eval", "demo", "evaluation.num_examples=4", "--policy", RUN, "--name", SCORES)
    entry = next(each for each in open_store(s3_root).ledger.entries(run=SCORES, stage="rollout") if not each.part)
    scored = store.read(entry.slices("traces"), ["policy_key", "error_class"]).to_pylist()
    assert scored == [{"policy_key": found[2][0], "error_class": None}] * 4, "served, and proven, over its base"
    third.call("export", RUN, "--format", "weights", "--to", str(tmp_path / "exported"))
    assert (tmp_path / "exported" / "config.json").exists()
    assert weights_sha256(tmp_path / "exported") not in {weights_sha256(base), found[2][1]}, "adapter and base in one"
