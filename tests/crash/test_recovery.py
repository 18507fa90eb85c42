"""Getting back to a policy without optimizer state, doing nothing twice, and branching off."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from storage.refs import Entry
from storage.schemas.stage_tables import TABLES
from storage.store import open_store
from tests.crash.checks import RARELY, check_clean, go_on, killed, requests
from tests.fixtures.driving import NAME, Driven, check_once, finished, side_by_side, weights, work

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_batches_are_trained_again_up_to_a_policy_without_optimizer_state(
    drive: Callable[..., Driven], optimizer: str
) -> None:
    settings = ("steps=4", f"training.optimizer.type={optimizer}")
    reference, run = drive(*settings), drive(*settings, RARELY)
    life, first = side_by_side(reference.live, lambda: killed(run, "after commit training 2"))
    assert life.status == 0, life.output
    states = [(run.store / "policies" / entry.key / "optimizer.safetensors").exists() for entry in trained(run)]
    assert states == [False, True, False], "the policy to go on from has no optimizer state, or the test shows nothing"
    again = go_on(run, first, steps=4)
    assert requests(again.moments) == 2, "step 2 again and step 3, but neither step 0 nor step 1"
    assert work(open_store(run.store)) == work(open_store(reference.store))
    assert weights(open_store(run.store)) == weights(open_store(reference.store))
    check_once(run.store)
    check_clean(run)


def trained(run: Driven) -> list[Entry]:
    """Return the ledger rows of the trainings, in order of steps."""
    return [entry for entry in finished(open_store(run.store)) if entry.stage == "training"]


@pytest.mark.essential
def test_recorded_weights_that_do_not_come_out_again_stop_the_run(drive: Callable[..., Driven]) -> None:
    run = drive(RARELY)
    killed(run, "before commit training 0")
    plant_weights(run.store)
    before = work(open_store(run.store))
    life = run.live()
    assert life.status == 1
    assert "WeightsDiffer" in life.output and "recorded are 0000" in life.output
    store = open_store(run.store)
    assert store.runs.events(NAME)[-1].event == "failed"
    steps = {(stage, step) for stage, step, _ in set(work(store)) - set(before)}
    again = {(stage, 1) for stage in ("assignment", "rollout", "filtering", "advantage", "packing")}
    assert steps == again | {("metrics", 0)}, "of the step whose training was planted"
    check_clean(run)


def plant_weights(root: Path) -> None:
    """Commit the training that a killed run had written, with another digest of its weights than they have."""
    store = open_store(root)
    written = {name: stored(root, name) for name in ("updates", "token_statistics", "policies")}
    policy = next(row for row in written["policies"].to_pylist() if row["version"] == 1)
    packing = next(entry for entry in finished(store) if entry.stage == "packing")
    written["policies"] = pa.Table.from_pylist([policy | {"weights_sha256": "0" * 64}], TABLES["policies"].arrow)
    place = {"run": NAME, "step": 0, "key": policy["policy_key"], "attempt": "planted"}
    slices = tuple(store.append(name, rows, **place) for name, rows in written.items())
    inputs = {"packing": packing.key, "policy": policy["parent_key"]}
    planted = replace(packing, stage="training", key=policy["policy_key"], attempt="planted")
    section = {"training": store.runs.config(NAME)["training"]}
    store.ledger.commit(replace(planted, section=section, inputs=inputs, outputs=slices))


def stored(root: Path, name: str) -> pa.Table:
    """Return the rows of a table that are on the disk, whether the ledger names them or not."""
    schema = TABLES[name].arrow
    return DeltaTable(str(root / "tables" / name)).to_pyarrow_table().sort_by("seq").select(schema.names).cast(schema)


@pytest.mark.parametrize("name", [NAME, "twin"])
def test_the_same_config_and_seed_again_computes_nothing_and_starts_nothing(name: str, uninterrupted: Driven) -> None:
    logs = uninterrupted.store / "logs"
    before = {path.name: path.stat().st_size for path in (logs / NAME).iterdir()}
    life = uninterrupted.live(name=name, prefect=True)
    assert life.status == 0, life.output
    assert (uninterrupted.outcome["num_computed"], uninterrupted.outcome["num_found"]) == (0, 16)
    assert life.sampled == () and not [moment for moment in life.moments if " append " in moment]
    assert {path.name: path.stat().st_size for path in (logs / NAME).iterdir()} == before, "a service was started"
    assert [path.name for path in logs.iterdir() if path.name != NAME and list(path.iterdir())] == []
    check_once(uninterrupted.store)


def test_another_advantage_computes_advantage_packing_and_training_alone(uninterrupted: Driven) -> None:
    life = uninterrupted.live(name="branch", overrides=["algorithm.normalise_std=true", "steps=1"])
    assert life.status == 0, life.output
    store = open_store(uninterrupted.store)
    branch = [entry for entry in store.ledger.entries(run="branch") if not entry.part]
    own = {entry.stage for entry in branch if {piece.run for piece in entry.outputs} == {"branch"}}
    shared = {entry.stage for entry in branch if {piece.run for piece in entry.outputs} == {NAME}}
    assert own == {"advantage", "packing", "training", "metrics"}
    assert shared == {"policy_import", "examples", "assignment", "rollout", "filtering"}
    assert (uninterrupted.outcome["num_computed"], uninterrupted.outcome["num_found"]) == (4, 5)
    assert life.sampled == ()
    made = {entry.key for entry in store.ledger.entries(stage="training") if entry.step == 0}
    assert len(made) == 2, "the branch has a policy of its own"
