"""Policies that are adapters: what they are laid over stays as long as they do, whatever is thinned or removed."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from storage.maintenance.plan import PolicyRetention, plan_removal
from storage.maintenance.sweep import carry_out
from storage.policies.manifest import BASE_FILE
from storage.refs import Entry
from tests.fixtures.histories import collect, evaluate, finish, policy_row

BASE = "import-base"
pytestmark = pytest.mark.usefixtures("long_ago")


def made(store, run, key, version, parent, base=""):
    """Publish a policy and name it in the ledger, as a training would, or an import; twice is taken over."""
    standing = store.ledger.find(key)
    if standing is not None:
        store.ledger.commit(replace(standing, run=run))
        return
    scratch = store.policies.scratch(key)
    name = "adapter_model.safetensors" if base else "model.safetensors"
    Path(scratch, name).write_bytes(key.encode() * 50)
    if base:
        Path(scratch, BASE_FILE).write_text(json.dumps({"policy_key": base, "weights_sha256": "w"}))
    store.policies.publish(scratch, key)
    row = policy_row(key, version, parent, has_optimizer=version > 0)
    step, now = max(0, version - 1), datetime.now(UTC)
    piece = store.append("policies", row, run=run, step=step, key=key, attempt=f"attempt-{key}")
    stage, inputs = ("training", {"policy": parent}) if parent else ("policy_import", {})
    store.ledger.commit(Entry(run, step, stage, 1, key, "", piece.attempt, {}, inputs, (piece,), now, now))


def adapted(store, run, name, steps=4):
    """A run that imports the base and trains so many adapters over it."""
    store.runs.record(run=run, event="started", kind="train", config={})
    made(store, run, BASE, 0, None)
    parent = BASE
    for step in range(steps):
        made(store, run, f"{name}-{step + 1}", step + 1, parent, BASE)
        parent = f"{name}-{step + 1}"
    finish(store, run)


def test_thinning_keeps_the_base(store):
    adapted(store, "a", "a")
    collect(store, "a", retention=PolicyRetention.parse("every:2"))
    assert set(store.policies.names()) == {BASE, "a-2", "a-4"}
    assert store.policies.directory(BASE, verify=True).is_dir()


def test_a_base_in_the_middle_of_a_kept_run_stays(store):
    """A replay laid adapters over a later policy of whole weights; it is gone, and a kept run tried its last one."""
    adapted(store, "source", "source", steps=0)
    for version in (1, 2, 3):
        made(store, "source", f"whole-{version}", version, f"whole-{version - 1}" if version > 1 else BASE)
    store.runs.record(run="replay", event="started", kind="replay", config={})
    made(store, "replay", "over-3", 3, "whole-2", "whole-2")
    made(store, "replay", "over-4", 4, "over-3", "whole-2")
    finish(store, "replay")
    evaluate(store, "tried", "over-4")
    going = plan_removal(store, ["source", "tried"], retention=PolicyRetention.parse("last"))
    assert going.removed == ("replay",)
    assert going.pruned == ("whole-1",)


def test_the_base_stays_while_a_kept_run_tried_an_adapter(store):
    adapted(store, "a", "a")
    evaluate(store, "tried", "a-3")
    going = plan_removal(store, ["tried"])
    assert {entry.key for entry in going.staying} == {"a-3", BASE}
    carry_out(store, going)
    assert set(store.policies.names()) == {"a-3", BASE}
    assert plan_removal(store, ["tried"]).policies == ()
