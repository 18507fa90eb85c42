"""The proof of a store: a healthy run is proven, and each fault that is planted in it is named with its ids."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from flows import cli
from flows.queries.proof import CHECKS, prove
from flows.queries.store_reader import StoreReader
from storage.keys import sha256
from storage.maintenance.sweep import Retention, expire
from storage.store import open_store
from tasks.learner.digest import tensors_sha256
from tasks.training import policy as policy_import
from tasks.training import stage as training
from tests.fixtures import rehearsal
from tests.fixtures.builders import stand_in, table


def tensors_of(key):
    """Return the weights of the policy of a key."""
    return {"weight": np.frombuffer(sha256(key.encode()).encode(), np.uint8).astype(np.float32)}


def policy(key, directory, version, parent):
    """Write weights and optimizer state of a policy; return its row."""
    save_file(tensors_of(key), directory / "model.safetensors")
    save_file(tensors_of(key + "optimizer"), directory / "optimizer.safetensors")
    row = {"policy_key": key, "version": version, "parent_key": parent, "has_optimizer": True}
    row |= {"weights_sha256": tensors_sha256(tensors_of(key)), "probe_token_ids": [1], "probe_logprobs": [0.0]}
    return {"policies": table("policies", [row])}


def imported(tables, config, *, key, source, directory):
    """Stand in for weights that are brought in."""
    return policy(key, directory, 0, None)


def learnt(tables, config, *, step, key, policy: training.Policy, directory):
    """Stand in for training, with the digests of its weights, and what it measured on each sample."""
    made = policy_made(key, directory, step + 1, policy.key)
    (row,) = rehearsal.trained(tables, config, step=step, key=key, policy=policy)["updates"].to_pylist()
    digests = (tensors_sha256(tensors_of(each)) for each in (policy.key, key))
    row |= dict(zip(("weights_sha256_in", "weights_sha256"), digests, strict=True))
    measured = [
        {"sample_id": name, "logprobs": row["logprobs"][begin:end], "entropies": [1.0] * (end - begin)}
        for row in tables["batches"].table(["sample_ids", "cu_seqlens", "logprobs"]).to_pylist()
        for name, (begin, end) in zip(row["sample_ids"], pairwise(row["cu_seqlens"]), strict=False)
    ]
    return {**made, "updates": table("updates", [row]), "token_statistics": table("token_statistics", measured)}


policy_made = policy


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The root of a store with a run of two steps."""
    root = tmp_path_factory.mktemp("proof") / "store"
    written = ("updates", "policies", "token_statistics")
    with pytest.MonkeyPatch.context() as patch:
        stages = rehearsal.STAND_INS
        patch.setitem(stages, "policy_import", stand_in(policy_import.STAGE, imported, writes=("policies",)))
        patch.setitem(stages, "training", stand_in(training.STAGE, learnt, writes=written))
        rehearsal.rehearse(root, "run")
    return root


@pytest.fixture
def root(healthy, tmp_path):
    """A copy of the store, in which a fault may be planted."""
    return shutil.copytree(healthy, tmp_path / "store")


def wrong(root, run=""):
    """Return the first counter-example of each check that fails."""
    return {row["check"]: row["first_wrong"] for row in prove(StoreReader.at(root), run) if row["wrong"]}


def plant(root, name, change, step=1, besides=False):
    """Let other rows be what the ledger names of a table and step, or stand besides, with digests of their own."""
    store = open_store(root)
    (entry,) = [each for each in store.ledger.entries(run="run") if each.step == step and each.slices(name)]
    rows = [change(number, row) for number, row in enumerate(store.read(entry.slices(name)).to_pylist())]
    made = table(name, [row for row in rows if row])
    piece = store.append(name, made, run="run", step=step, key=entry.key, attempt="planted")
    store.ledger.remove("run", {(entry.key, entry.part)}, datetime.now(UTC), whole=False)
    others = tuple(each for each in entry.outputs if besides or each.table != name)
    store.ledger.commit(replace(entry, outputs=(*others, piece)))


def first(**values):
    """Return a change of the first row."""
    return lambda number, row: row if number else row | values


def test_a_healthy_run_is_proven(healthy, capsys):
    assert cli.main(["verify", "run", "--store", str(healthy), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["proven"] and not report["wrong"]
    found = {row["check"]: (row["proven"], row["wrong"], row["unproven"]) for row in report["checks"]}
    assert found.keys() == CHECKS.keys() and all(row[0] for row in found.values())
    assert {name: found[name] for name in ("assignments", "training", "weights", "optimizer", "rewards")} == {
        **{"assignments": (24, 0, 0), "training": (24, 0, 0), "rewards": (24, 0, 0)},
        **{"weights": (3, 0, 0), "optimizer": (3, 0, 0)},
    }


@pytest.mark.parametrize(
    ("check", "name", "change", "words"),
    [
        ("assignments", "traces", lambda number, row: row if number else None, "1 assignments left no trace, first 1-"),
        ("assignments", "traces", first(assignment_id="9-9/0"), "left no trace, first 1-"),
        ("training", "batches", lambda _, row: row | {"sample_ids": row["sample_ids"][:1] * 2}, "is there 2 times"),
        (
            "training",
            "batches",
            lambda _, row: row | {"sample_ids": row["sample_ids"][1:]},
            "has a weight and is in no",
        ),
        ("training", "token_statistics", lambda number, row: row if number else None, "trained 0 times"),
        ("rewards", "traces", first(reward=None), "trace trace-1-0-0: no reward and no error"),
        ("rewards", "traces", first(reward=float("inf")), "trace trace-1-0-0: inf"),
        ("policies", "traces", first(policy_version=7), "trace trace-1-0-0: policy "),
        ("weights", "updates", first(weights_sha256_in="0" * 64), "do not lead from the weights of the policy before"),
        ("weights", "policies", first(weights_sha256="0" * 64), "recorded is 000000000000"),
    ],
)
def test_a_planted_row_is_named(root, check, name, change, words):
    plant(root, name, change)
    found = wrong(root)
    assert words in found.pop(check)
    assert not found, "nothing else is wrong"


def test_another_version_of_imported_weights_is_named(root):
    plant(root, "traces", first(policy_version=7), step=0)
    found = wrong(root)
    assert found.keys() == {"policies"} and "trace trace-0-0-0: policy " in found["policies"]


@pytest.mark.parametrize(
    ("finished", "check", "words"),
    [
        ({"assignment"}, "assignments", "run run, step 1, stage assignment"),
        ({"assignment", "rollout"}, "training", "run run, step 1: not packed"),
    ],
)
def test_a_step_that_has_not_ended_is_not_called_proven(root, finished, check, words):
    store = open_store(root)
    entries = store.ledger.entries(run="run")
    later = {(entry.key, entry.part) for entry in entries if entry.step == 1 and entry.stage not in finished}
    store.ledger.remove("run", later, datetime.now(UTC), whole=False)
    rows = prove(StoreReader.at(root))
    assert not any(row["wrong"] for row in rows)
    assert words in {row["check"]: row["why_unproven"] for row in rows if row["unproven"]}.get(check, "")


def test_a_row_that_stands_twice_is_named(root):
    plant(root, "verdicts", lambda number, row: None if number else row, besides=True)
    assert "table verdicts: rows with the same trace_id" in wrong(root)["rows"]


def test_a_row_changed_in_a_parquet_file_is_named(root):
    entries = open_store(root).ledger.entries(run="run", stage="rollout")
    (piece,) = [piece for entry in entries if entry.step for piece in entry.slices("traces")]
    path = root / "tables" / "traces" / piece.files[0].path
    rows = pq.read_table(path, partitioning=None)
    rewards = pa.array([0.5, *rows["reward"].to_pylist()[1:]])
    pq.write_table(rows.set_column(rows.schema.names.index("reward"), "reward", rewards), path)
    found = wrong(root, "run")
    assert "run run, step 1, stage rollout" in found["rows"] and "table traces" in found["rows"]


@pytest.mark.parametrize(("check", "file"), [("weights", "model"), ("optimizer", "optimizer")])
def test_a_flipped_byte_of_a_policy_is_named(root, check, file, capsys):
    path = sorted((root / "policies").rglob(f"{file}.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = wrong(root)
    assert found.keys() == {check} and path.name in found[check] and "stage" in found[check]
    assert cli.main(["verify", str(root)]) == 1
    assert f"{check}: " in (printed := capsys.readouterr().out) and path.name in printed and "WRONG" in printed


def test_what_cannot_be_proven_is_no_pass(root, capsys):
    store = open_store(root)
    keys = [entry.key for entry in store.ledger.entries(run="run", stage="training")]
    store.policies.remove(keys[0], "gc")
    (row,) = [row for row in prove(StoreReader.at(root)) if row["check"] == "weights"]
    assert (row["proven"], row["wrong"], row["unproven"]) == (2, 0, 1) and "removed" in row["why_unproven"]
    assert cli.main(["verify", str(root)]) == 0
    assert "nothing is wrong; not all of it is proven" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("updates", {"weights"}),
        ("policies", {"weights"}),
        ("traces", {"policies", "rewards", "assignments", "training"}),
    ],
)
def test_what_dropped_rows_would_prove_is_not_called_proven(root, name, checks):
    expire(open_store(root), Retention(name, 0))
    rows = prove(StoreReader.at(root))
    assert not any(row["wrong"] for row in rows)
    assert {row["check"] for row in rows if row["unproven"]} == {"rows", *checks}


def test_a_log_that_lost_a_commit_is_named(root):
    log = root / "tables" / "verdicts" / "_delta_log"
    for path in sorted(log.glob("*.json"))[-1:]:
        path.unlink()
    assert cli.main(["verify", str(root)]) == 1


def test_no_store_and_no_run_are_refused(healthy, tmp_path, capsys):
    assert cli.main(["verify", "other", "--store", str(healthy)]) not in (0, 1)
    assert cli.main(["verify", str(tmp_path / "none")]) not in (0, 1)
