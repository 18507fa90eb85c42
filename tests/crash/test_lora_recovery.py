"""Getting back to adapters whose optimizer state was not saved, and laying adapters over a policy of another run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.policies.manifest import adapter_base
from storage.store import Store, open_store
from tests.crash.checks import RARELY, check_clean, go_on, killed, requests
from tests.fixtures.driving import NAME, Driven, rows, side_by_side, work

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

LORA = "training.lora={rank=4, alpha=8}"


def digests(store: Store) -> list[str]:
    """Return the digests of the run's policies, in order of versions."""
    return [row["weights_sha256"] for row in sorted(rows(store)["policies"], key=lambda row: row["version"])]


def test_batches_are_trained_again_up_to_an_adapter_without_optimizer_state(drive: Callable[..., Driven]) -> None:
    settings = ("steps=4", LORA)
    reference, run = drive(*settings), drive(*settings, RARELY)
    life, first = side_by_side(reference.live, lambda: killed(run, "after commit training 2"))
    assert life.status == 0, life.output
    again = go_on(run, first, steps=4)
    assert requests(again.moments) == 2, "step 2 again and step 3, but neither step 0 nor step 1"
    assert work(open_store(run.store)) == work(open_store(reference.store))
    assert digests(open_store(run.store)) == digests(open_store(reference.store))
    assert len(set(digests(open_store(run.store)))) == 5
    check_clean(run)


def test_a_replay_lays_adapters_over_a_recorded_policy(drive: Callable[..., Driven]) -> None:
    run = drive("steps=3")
    assert run.live().status == 0
    asked = {
        "run": NAME,
        "from_stage": "training",
        "steps": "1:",
        "policies": "own",
        "overrides": [LORA],
        "name": "over",
    }
    life = run.live(replays=[asked])
    assert life.status == 0, life.output
    store = open_store(run.store)
    recorded = {entry.step: entry.key for entry in store.ledger.entries(run=NAME, stage="training")}
    adapted = [entry.key for entry in store.ledger.entries(run="over", stage="training")]
    assert len(adapted) == 2
    assert {adapter_base(Path(store.policies.directory(key))) for key in adapted} == {recorded[0]}
