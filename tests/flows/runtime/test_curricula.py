"""Curricula in whole runs: what is known of examples goes from step to step, and a resume finds it as it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.queries.step_history import step_history
from flows.runtime.plan import plan_work
from storage.store import Store, open_store
from tasks.assignment.samplers.sampler import DifficultiesMissing
from tests.fixtures.rehearsal import SMALL, SOURCE, die, made, play_equal, rehearse, session_for
from tests.fixtures.replays import ask, pieces, walk

pytestmark = pytest.mark.engine

STEPS = 3
POOLS: dict[str, Any] = {
    "steps": STEPS,
    "assignment": SMALL["assignment"] | {"sampler": {"type": "difficulty_pools"}},
}
REFILL: dict[str, Any] = POOLS | {"assignment": POOLS["assignment"] | {"refill": True}}
EQUAL = {"1-0", "0-2"}


@pytest.fixture(scope="module", autouse=True)
def equals() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        play_equal(patch, EQUAL)
        yield


@pytest.fixture(scope="module", params=[POOLS, REFILL], ids=["pools", "pools and refill"])
def changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


@pytest.fixture(scope="module")
def origin(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("curriculum") / "store"
    rehearse(root, "base", **changes)
    return root


def of_step(store: Store, stage: str, table: str, step: int) -> list[dict[str, Any]]:
    """The rows of all work of a stage at a step."""
    return [row for rows in made(store, stage, table, step=step) for row in rows]


def test_what_is_known_after_a_step_is_what_its_rollouts_earned(origin: Path) -> None:
    """Every group of a step counts, replaced or not; a loop over traces says the same."""
    store = open_store(origin)
    known: dict[str, tuple[float, int]] = {}
    for step in range(STEPS):
        recorded = of_step(store, "assignment", "difficulties", step)
        rows = {row["example_id"]: (row["reward"], row["num_groups"]) for row in recorded}
        assert rows.keys() == known.keys() and all(rows[name] == pytest.approx(known[name]) for name in rows)
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in of_step(store, "rollout", "traces", step):
            groups.setdefault(row["group_id"], []).append(row)
        for members in groups.values():
            example = members[0]["example_id"]
            mean = sum(row["reward"] for row in members) / len(members)
            known[example] = (mean, known.get(example, (0.0, 0))[1] + 1)
        assert len({members[0]["example_id"] for members in groups.values()}) == len(groups), "none twice in a step"
    assert len(known) > SMALL["assignment"]["groups_per_step"]


@pytest.mark.parametrize("last", [8, 15])
def test_a_run_that_dies_goes_on_with_the_state_that_it_had(
    origin: Path, changes: dict[str, Any], tmp_path: Path, last: int
) -> None:
    die(tmp_path / "store", "base", last, **changes)
    store, whole = rehearse(tmp_path / "store", "base", **changes), open_store(origin)
    assert {each.key for each in store.ledger.entries(run="base")} == {
        each.key for each in whole.ledger.entries(run="base")
    }
    for step in range(STEPS):
        for name in ("assignments", "difficulties"):
            assert made(store, "assignment", name, step=step) == made(whole, "assignment", name, step=step)


def test_what_is_recorded_is_foretold(origin: Path, changes: dict[str, Any]) -> None:
    place = session_for(origin, "base", **changes).context
    assert not any(ref.computed for ref in plan_work(place, SOURCE))


@pytest.mark.parametrize("steps", ["", "1:"])
def test_a_replay_that_assigns_again_goes_on_from_the_recorded_state(origin: Path, weights: None, steps: str) -> None:
    config = ask(origin, from_stage="assignment", until="training", steps=steps)
    assert [ref for ref in pieces(config) if ref.computed] == []
    session, _ = walk(config)
    assert session.num_computed == 0


def test_the_step_whose_state_a_replay_goes_on_from_is_none_of_its_own(origin: Path, weights: None) -> None:
    config = ask(origin, from_stage="assignment", steps="1:", name="late")
    session, _ = walk(config)
    assert list(step_history(session.context.store, "late").steps) == [*range(1, STEPS)]
    again = ask(origin, run="late", from_stage="assignment")
    assert again.replay.first_step == 1 and not [ref for ref in pieces(again) if ref.computed]


def test_a_replay_that_would_begin_without_state_is_an_error(tmp_path: Path, weights: None) -> None:
    rehearse(tmp_path / "store", "base", steps=2)
    override = 'assignment.sampler={type="difficulty_pools"}'
    cold = {"from_stage": "assignment", "until": "assignment", "overrides": [override]}
    with pytest.raises(DifficultiesMissing, match="before step 1"):
        walk(ask(tmp_path / "store", steps="1:", **cold))


def test_a_batch_that_is_drawn_again_knows_what_came_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: None
) -> None:
    play_equal(monkeypatch, {"0-0", "0-1", "0-2"})
    store = rehearse(tmp_path / "store", "base", **POOLS | {"steps": 1})
    first, second = (entry for entry in store.ledger.entries(run="base", stage="assignment"))
    assert (first.slices("difficulties")[0].rows, second.slices("difficulties")[0].rows) == (0, 3)
    tried = [
        {row["example_id"] for row in store.read(each.slices("assignments")).to_pylist()} for each in (first, second)
    ]
    assert not tried[0] & tried[1]
    replay = ask(tmp_path / "store", from_stage="assignment", until="training")
    assert [ref for ref in pieces(replay) if ref.computed] == []
