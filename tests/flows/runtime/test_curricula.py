"""Curricula in whole runs: what is known of examples goes from step to step, and a resume finds it as it was."""

import pytest

from tasks.assignment.samplers.sampler import DifficultiesMissing
from tests.fixtures.rehearsal import POOLS, REFILLED_POOLS, SMALL, made, play_equal, rehearse
from tests.fixtures.replays import ask, missing, replay

pytestmark = pytest.mark.engine


def of_step(store, stage, table, step):
    """The rows of all work of a stage at a step."""
    return [row for rows in made(store, stage, table, step=step) for row in rows]


@pytest.mark.parametrize("settings", [POOLS, REFILLED_POOLS], ids=["pools", "pools and refill"])
def test_what_is_known_after_a_step_is_what_its_rollouts_earned(root, monkeypatch, settings):
    """Every group of a step counts, replaced or not; a loop over traces says the same."""
    play_equal(monkeypatch, {"1-0", "0-2"})
    store = rehearse(root, "base", **settings)
    known = {}
    for step in range(settings["steps"]):
        recorded = of_step(store, "assignment", "difficulties", step)
        rows = {row["example_id"]: (row["reward"], row["num_groups"]) for row in recorded}
        assert rows.keys() == known.keys() and all(rows[name] == pytest.approx(known[name]) for name in rows)
        groups = {}
        for row in of_step(store, "rollout", "traces", step):
            groups.setdefault(row["group_id"], []).append(row)
        for members in groups.values():
            example = members[0]["example_id"]
            mean = sum(row["reward"] for row in members) / len(members)
            known[example] = (mean, known.get(example, (0.0, 0))[1] + 1)
        assert len({members[0]["example_id"] for members in groups.values()}) == len(groups), "none twice in a step"
    assert len(known) > SMALL["assignment"]["groups_per_step"]


def test_a_replay_that_would_begin_without_state_is_an_error(root, weights):
    rehearse(root, "base", steps=2)
    override = 'assignment.sampler={type="difficulty_pools"}'
    cold = {"from_stage": "assignment", "until": "assignment", "overrides": [override]}
    with pytest.raises(DifficultiesMissing, match="before step 1"):
        replay(root, steps="1:", **cold)


def test_a_batch_that_is_drawn_again_knows_what_came_of_the_one_before(root, monkeypatch, weights):
    play_equal(monkeypatch, {"0-0", "0-1", "0-2"})
    store = rehearse(root, "base", **POOLS | {"steps": 1})
    first, second = (entry for entry in store.ledger.entries(run="base", stage="assignment"))
    assert (first.slices("difficulties")[0].rows, second.slices("difficulties")[0].rows) == (0, 3)
    tried = {row["group_id"]: row["example_id"] for row in of_step(store, "assignment", "assignments", 0)}
    assert len(tried) == 6 == len(set(tried.values())), "none twice"
    assert missing(ask(root, from_stage="assignment", until="training")) == []
