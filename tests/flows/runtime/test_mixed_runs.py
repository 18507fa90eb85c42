"""Everything at once: two environments with algorithms of their own, one with state, groups replaced, examples drawn by
difficulty, one step off-policy. Interrupted and replayed, such a run is the run that it would have been."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.run import View
from flows.runtime.plan import plan_work
from storage.schemas.stage_tables import EXAMPLES
from storage.store import Store, open_store
from tasks.runtime.imports import code_version
from tasks.runtime.stage import Tables
from tests.fixtures import rehearsal
from tests.fixtures.builders import example
from tests.fixtures.rehearsal import SOURCE, rehearse, session_for
from tests.fixtures.replays import ask, pieces

pytestmark = pytest.mark.engine

REMEMBERING = "tests.fixtures.masks:remembering"
NAMES = ("plain", "remembered")
MIXED: dict[str, Any] = {
    "steps": 3,
    "rollout": {"max_off_policy_steps": 1},
    "assignment": {"groups_per_step": 6, "group_size": 4, "refill": True, "sampler": {"type": "difficulty_pools"}},
    "algorithm": {"type": "dr_grpo", "length_normaliser": 8, "overlong": {"max_tokens": 8, "buffer_tokens": 4}},
    "admission": {},
    "environments": (
        {"name": "plain", "taskset": {"id": "plain"}},
        {
            "name": "remembered",
            "taskset": {"id": "remembered"},
            "weight": 2.0,
            "algorithm": {
                "type": "custom",
                "function": REMEMBERING,
                "keeps_state": True,
                "version": code_version(REMEMBERING),
            },
        },
    ),
}


def luck(_: int, row: dict[str, Any]) -> dict[str, Any]:
    """Let some groups earn the same, and some fail, as the group's name and the policy say."""
    found = hashlib.sha256(f"{row['group_id']} {row['policy_version']}".encode()).digest()[0]
    return {"reward": 1.0} if found % 3 == 0 else {"error_class": "TimeoutError"} if found % 5 == 0 else {}


def listed(tables: Tables, view: View) -> Tables:
    rows = [example(f"{name}-{number}", name) for name in NAMES for number in range(8)]
    return {"examples": pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)}


@pytest.fixture(scope="module", autouse=True)
def played() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        rehearsal.play(patch, rollout=rehearsal.sampled_with(luck), examples=listed)
        yield


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixed") / "store"
    rehearse(root, "base", **MIXED)
    return root


def rows(store: Store) -> dict[tuple[str, str], list[str]]:
    """The digests of all rows of the run, by the key of the work and the table."""
    entries = store.ledger.entries(run="base")
    return {(each.key, piece.table): [piece.digest] for each in entries for piece in each.outputs}


def test_every_part_of_it_has_work_to_do(origin: Path) -> None:
    store = open_store(origin)
    assigned = store.ledger.entries(run="base", stage="assignment")
    assert len(assigned) > MIXED["steps"], "groups were replaced"
    state = max(store.ledger.entries(run="base", stage="advantage"), key=lambda entry: entry.finished_at)
    assert state.step == MIXED["steps"] - 1 and "advantage" in state.inputs
    kept = store.read(state.slices("estimator_states"), ["environment"])["environment"].to_pylist()
    assert {*kept} == {"remembered"}


@pytest.mark.parametrize("left", [9, 20])
def test_killed_anywhere_it_goes_on_as_if_it_had_not(origin: Path, tmp_path: Path, left: int) -> None:
    rehearsal.die(tmp_path / "store", "base", left, **MIXED)
    assert len(rows(open_store(tmp_path / "store"))) < len(rows(open_store(origin)))
    assert rows(rehearse(tmp_path / "store", "base", **MIXED)) == rows(open_store(origin))


def test_all_of_it_is_foretold_and_found_by_replays(origin: Path) -> None:
    place = session_for(origin, "base", **MIXED).context
    assert not any(ref.computed for ref in plan_work(place, SOURCE))
    for steps in ("", "1:"):
        found = pieces(ask(origin, from_stage="filtering", steps=steps))
        assert {ref.stage for ref in found if ref.computed} == {"metrics"}, "it ends earlier than the run did"
