"""Small runs for tests of what may go: chains of work over real slices and policies, shared as runs share them."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pyarrow as pa

from storage.refs import Entry
from storage.schemas.stage_tables import TABLES
from storage.store import Store
from tests.storage.rows import messages


def policy_row(key: str, version: int, parent: str | None, has_optimizer: bool) -> pa.Table:
    """The row of the policies table for one version."""
    row = {
        "policy_key": key,
        "version": version,
        "parent_key": parent,
        "weights_sha256": "w",
        "has_optimizer": has_optimizer,
        "probe_token_ids": [1],
        "probe_logprobs": [0.0],
    }
    return pa.Table.from_pylist([row], TABLES["policies"].arrow)


def publish(store: Store, key: str) -> None:
    """A small directory of weights under a key."""
    scratch = store.policies.scratch(key)
    Path(scratch, "model.safetensors").write_bytes(key.encode() * 50)
    store.policies.publish(scratch, key)


def work(
    store: Store, run: str, key: str, step: int = 0, stage: str = "rollout", inputs: dict[str, str] | None = None
) -> Entry:
    """Do a piece of work, or take it over from whoever has done it; return the run's own row."""
    standing = store.ledger.find(key, run=run)
    if standing is not None:
        return store.ledger.commit(replace(standing, run=run, step=step))
    attempt = uuid4().hex
    rows = messages(2 + len(key) % 3)
    made = [store.append("messages", rows, run=run, step=step, key=key, attempt=attempt)]
    now = datetime.now(UTC)
    if stage == "training":
        publish(store, key)
        made_row = policy_row(key, step + 1, (inputs or {}).get("policy"), step % 2 == 0)
        made.append(store.append("policies", made_row, run=run, step=step, key=key, attempt=attempt))
    return store.ledger.commit(
        Entry(run, step, stage, 1, key, "", attempt, {"x": 1}, inputs or {}, tuple(made), now, now)
    )


def train(store: Store, run: str, branch: Sequence[str], finished: bool = True) -> None:
    """A run of as many steps as `branch` has letters; runs share the steps up to where their letters part."""
    store.runs.record(run=run, event="started", kind="train", config={})
    policy = ""
    for step in range(len(branch)):
        name = "".join(branch[: step + 1])
        work(store, run, f"rollout-{name}", step, inputs={"policy": policy} if policy else {})
        inputs = {"rollout": f"rollout-{name}"} | ({"policy": policy} if policy else {})
        policy = work(store, run, f"training-{name}", step, "training", inputs).key
    if finished:
        finish(store, run)


def evaluate(store: Store, run: str, policy: str) -> None:
    """A run that tries a policy which it did not make."""
    store.runs.record(run=run, event="started", kind="evaluate", config={})
    work(store, run, f"tried-{policy}", 0, inputs={"policy": policy})
    finish(store, run)


def finish(store: Store, run: str) -> None:
    """Say that a run finished."""
    store.runs.record(run=run, event="finished")


def contents(store: Store, runs: Sequence[str]) -> dict[tuple[str, str, str], list[pa.Table]]:
    """Every row of the ledger of some runs with every slice that it names, read and verified."""
    rows = [entry for run in runs for entry in store.ledger.entries(run=run)]
    return {entry.row_id: [store.read([piece]) for piece in entry.outputs] for entry in rows}


def lasting(store: Store, runs: Sequence[str]) -> None:
    """Assert that every policy that some runs made can be read, digests included."""
    for run in runs:
        for entry in store.ledger.entries(run=run, stage="training"):
            assert store.policies.directory(entry.key, verify=True).is_dir()
