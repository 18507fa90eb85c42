"""Demonstrations as traces: whose they are is in their ids."""

import json
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from storage.store import Store, open_store
from tasks import assignment, demonstration, filtering
from tasks.stage import Place, Ref, Stage, perform
from tests.builders import table

EXAMPLES = [
    {"environment": "demonstrations", "example_id": str(number), "split": "train", "task": json.dumps({"messages": []})}
    for number in range(64)
]
LISTING = Stage("examples", 1, (), ("examples",), (), lambda tables, config: {"examples": table("examples", EXAMPLES)})


def rendered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a question of one token and an answer of one token."""
    row = {"is_content": [True], "logprobs": [0.0], "content": "x", "body": "{}"}
    asked = row | {"message": 0, "parent": None, "role": "user", "sampled": False, "token_ids": [1], "mask": [False]}
    said = row | {"message": 1, "parent": 0, "role": "assistant", "sampled": True, "token_ids": [2], "mask": [True]}
    return [asked, said]


def shown(store: Store, run: str, seed: int) -> tuple[Place, Ref]:
    """Assign and render the demonstrations of step 0 of a supervised run."""
    config = RunConfig.model_validate(
        {
            "kind": "sft",
            "seed": seed,
            "environments": ({"name": "demonstrations", "taskset": {"id": "demonstrations"}},),
            "assignment": {"groups_per_step": 4, "group_size": 1},
            "data": {"path": "demonstrations.jsonl"},
            "filtering": {"filters": [{"type": "errored"}]},
        }
    )
    place = Place(store, run, config, {})
    listed = perform(LISTING, place, 0)
    drawn = perform(assignment.task.stage, place, 0, (listed,), services={"batch": 0, "groups": None})
    return place, perform(demonstration.STAGE, place, 0, (drawn, listed), services={"render": rendered})


def traces_of(place: Place, ref: Ref) -> dict[str, str]:
    """Return the example of every trace."""
    found = place.table("traces", (ref,))
    return dict(zip(found["trace_id"].to_pylist(), found["example_id"].to_pylist(), strict=True))


def test_another_run_has_other_traces_unless_it_does_the_same_work(tmp_path: Path) -> None:
    store, elsewhere = open_store(tmp_path / "one"), open_store(tmp_path / "two")
    first, other = (traces_of(*shown(store, f"run-{seed}", seed)) for seed in (1, 2))
    assert len(first) == len(other) == 4 and set(first.values()) != set(other.values())
    assert not first.keys() & other.keys()
    assert traces_of(*shown(elsewhere, "again", 1)) == first, "equal inputs give equal ids"


def test_a_finding_about_one_run_takes_nothing_from_another(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (one, shown_one), (other, shown_other) = (shown(store, f"run-{seed}", seed) for seed in (1, 2))
    noted = store.quarantines.record(traces_of(one, shown_one), where="true", reason="wrong answers", run="run-1")
    bag = {"quarantined": store.quarantines.reasons([noted.quarantine])}
    kept = [
        place.table("verdicts", (perform(filtering.STAGE, place, 0, (ref,), services=bag),))["keep"].to_pylist()
        for place, ref in ((one, shown_one), (other, shown_other))
    ]
    assert kept == [[False] * 4, [True] * 4]
