"""Getting back to a policy without optimizer state, doing nothing twice, branching off, and a learner that hangs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from storage.refs import Entry
from storage.schemas.stage_tables import TABLES
from storage.store import open_store
from tests.crash.checks import RARELY, check_clean, check_same, go_on, killed, requests
from tests.fixtures.driving import NAME, Driven, Life, check_once, finished, rows, side_by_side, weights, work
from tests.fixtures.faults import happened

ROUNDED = ("training.dtype=bfloat16", "training.policy_dtype=bfloat16")
SELDOM = "training.save_optimizer_every=9"
KEPT = ("learner.memory_directory=DIRECTORY", "learner.keep_state=true")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def killed_rarely_saved(drive: Callable[..., Driven], *settings: str) -> tuple[Driven, Driven, Life]:
    """Kill a run of four steps after its third training; return it, the same that nobody killed, and the first life."""
    reference, run = drive("steps=4", *settings), drive("steps=4", *settings, RARELY)
    life, first = side_by_side(reference.live, lambda: killed(run, "after commit training 2"))
    assert life.status == 0, life.output
    return run, reference, first


def go_on_from_step_2(run: Driven, first: Life, reference: Driven) -> None:
    again = go_on(run, first, steps=4)
    assert requests(again.moments) == 2, "step 2 again and step 3, but neither step 0 nor step 1"
    assert work(open_store(run.store)) == work(open_store(reference.store))


@pytest.mark.fault(
    "process", "a flow is killed that keeps optimizer state seldom", "batches are trained again, the same weights"
)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.nightly)])
def test_batches_are_trained_again_up_to_a_policy_without_optimizer_state(drive, optimizer):
    run, reference, first = killed_rarely_saved(drive, f"training.optimizer.type={optimizer}")
    states = [(run.store / "policies" / entry.key / "optimizer.safetensors").exists() for entry in trained(run)]
    assert states == [False, True, False], "the policy to go on from has no optimizer state, or the test shows nothing"
    happened(f"SIGKILL to {first.receipts[0]['pid']}")
    go_on_from_step_2(run, first, reference)
    assert weights(open_store(run.store)) == weights(open_store(reference.store))
    check_once(run.store)
    check_clean(run)


@pytest.mark.nightly
@pytest.mark.fault("process", "a flow is killed that removes earlier weights", "the same weights, from what was kept")
def test_a_run_that_keeps_few_weights_goes_on_from_them(drive):
    run, reference, first = killed_rarely_saved(drive, "training.keep_weights=last")
    present = [(run.store / "policies" / entry.key).exists() for entry in trained(run)]
    assert present == [False, True, True], "of the last one the state is not saved, so that of the second is needed"
    happened(f"SIGKILL to {first.receipts[0]['pid']}")
    go_on_from_step_2(run, first, reference)
    ends = [rows(open_store(each.store))["policies"] for each in (run, reference)]
    assert [row["weights_sha256"] for row in ends[0]] == [row["weights_sha256"] for row in ends[1]]
    assert len(open_store(run.store).policies.names()) == 2, "the first one and the last, whose state is saved"


@pytest.mark.nightly
@pytest.mark.fault("process", "the learner is killed between saved states", "no step is trained again")
@pytest.mark.parametrize("overrides", [ROUNDED, ()])
def test_a_lost_learner_goes_on_from_what_it_kept_in_memory(drive, overrides):
    often, run = (
        drive("steps=4", *overrides),
        drive("steps=4", *overrides, SELDOM, *KEPT),
    )
    undisturbed, lost = side_by_side(often.live, lambda: run.live(lose="after request train #4"))
    assert undisturbed.status == lost.status == 0, undisturbed.output + lost.output
    happened(f"SIGKILL to the learner of {lost.receipts[0]['pid']}")
    assert requests(lost.moments) == 5, "the step that it was at is trained again, and none before"
    assert [state_saved(run, entry) for entry in trained(run)] == [False] * 4, "or the test shows nothing"
    assert weights(open_store(run.store)) == weights(open_store(often.store))
    assert not list(run.directory.glob("stagecoach-*/*")), "the memory is given back"


def state_saved(run: Driven, entry: Entry) -> bool:
    """Tell whether optimizer state lies beside the weights of a policy."""
    return any((run.store / "policies" / entry.key).glob("optimizer*"))


def trained(run: Driven) -> list[Entry]:
    """Return the ledger rows of the trainings, in order of steps."""
    return [entry for entry in finished(open_store(run.store)) if entry.stage == "training"]


@pytest.mark.fault("weights", "other weights are recorded than come out again", "the run stops with WeightsDiffer")
@pytest.mark.essential
def test_recorded_weights_that_do_not_come_out_again_stop_the_run(drive):
    run = drive(RARELY)
    killed(run, "before commit training 0")
    plant_weights(run.store)
    before = work(open_store(run.store))
    happened("the digest 0000 is recorded")
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


@pytest.mark.nightly
@pytest.mark.parametrize("name", [NAME, "twin"])
def test_the_same_config_and_seed_again_computes_nothing_and_starts_nothing(name, uninterrupted):
    logs = uninterrupted.store / "logs"
    before = {path.name: path.stat().st_size for path in (logs / NAME).iterdir()}
    life = uninterrupted.live(name=name, prefect=True)
    assert life.status == 0, life.output
    assert (uninterrupted.outcome["num_computed"], uninterrupted.outcome["num_found"]) == (0, 16)
    assert life.sampled == () and not [moment for moment in life.moments if " append " in moment]
    assert {path.name: path.stat().st_size for path in (logs / NAME).iterdir()} == before, "a service was started"
    assert [path.name for path in logs.iterdir() if path.name != NAME and list(path.iterdir())] == []
    check_once(uninterrupted.store)


TRAINING = "after request train #2"
PATIENT = ("learner.hang_seconds=20", "learner.max_restarts=5")
"""Short for a test, and longer than a busy machine keeps this small learner from its next row."""


@pytest.mark.fault("services", "the learner is stopped within a request", "it is named and replaced, the same weights")
@pytest.mark.nightly
def test_a_stopped_learner_is_replaced_and_the_run_ends_as_if_nothing_had_happened(drive, uninterrupted):
    run, tired = drive(*PATIENT), drive("learner.hang_seconds=20", "learner.max_restarts=0")
    life, last = side_by_side(lambda: run.live(stop=TRAINING), lambda: tired.live(stop=TRAINING))
    assert [receipt["moment"] for receipt in life.receipts] == [TRAINING]
    happened("SIGSTOP to the learner")
    assert life.status == 0, life.output
    heading = "--- learner, generation 2: the one before did not answer any more and was ended\n"
    assert heading in (run.store / "logs" / NAME / "learner.log").read_text()
    assert "has not answered for 20 s (learner.hang_seconds)" in life.output
    check_same(run, uninterrupted)
    assert last.status == 1
    assert "service 'learner' did not answer any more and was ended in generation 1: no restart of 0" in last.output
    assert "What is in the store is safe" in last.output
    check_once(tired.store)
    done = [(stage, step) for stage, step, _ in work(open_store(tired.store)) if stage in ("packing", "training")]
    assert sorted(done) == [("packing", 0), ("packing", 1), ("training", 0)], "all but the step that it stood still in"
