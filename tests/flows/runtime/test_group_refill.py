"""Dynamic sampling in whole runs: which groups are replaced, when it ends, and that interruptions and replays agree."""

import polars as pl
import pytest

from configs.errors import ConfigError
from flows.orchestration.states import EmptyBatch
from flows.queries.step_history import step_history
from flows.queries.views import relations
from flows.runtime import loop
from flows.runtime.loop import plan_work
from flows.runtime.session import record_run
from storage.read.frames import Frames
from storage.store import open_store
from tests.fixtures.histories import results
from tests.fixtures.rehearsal import (
    EQUAL,
    REFILL,
    SOURCE,
    Rehearsal,
    die,
    made,
    play_equal,
    rehearse,
    reported,
    session_for,
)
from tests.fixtures.replays import RLOO, ask, replay

GROUPS, SIZE = 3, 4


@pytest.fixture(autouse=True)
def equals():
    with pytest.MonkeyPatch.context() as patch:
        play_equal(patch, EQUAL)
        yield


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A store with a run that replaced groups."""
    root = tmp_path_factory.mktemp("refilled") / "store"
    with pytest.MonkeyPatch.context() as patch:
        play_equal(patch, EQUAL)
        rehearse(root, "base", **REFILL)
    return root


def entries(store, stage, step, run="base"):
    found = [each for each in results(store, stage, run) if each.step == step]
    return sorted(found, key=lambda each: each.finished_at)


def rows(store, stage, table, step):
    return made(store, stage, table, step=step)


def lengths(store, stage, table, step):
    return [len(each) for each in rows(store, stage, table, step)]


def outcomes(described):
    return {share["outcome"]: share["num_traces"] for share in described["outcomes"]}


def test_exactly_the_missing_groups_are_drawn_until_none_is_missing(origin):
    store = open_store(origin)
    drawn = [{row["group_id"] for row in each} for each in rows(store, "assignment", "assignments", 0)]
    assert drawn == [{"0-0", "0-1", "0-2"}, {"0.1-0", "0.1-1"}, {"0.2-0"}]
    assert lengths(store, "rollout", "traces", 0) == [3 * SIZE, 2 * SIZE, SIZE]
    assert lengths(store, "filtering", "verdicts", 0) == [3 * SIZE, 5 * SIZE, 6 * SIZE]
    (batches,) = rows(store, "packing", "batches", 0)
    trained = {name.rsplit("-", 1)[0] for row in batches for name in row["sample_ids"]}
    assert trained == {"trace-0-1", "trace-0.1-1", "trace-0.2-0"}
    assert len(rows(store, "assignment", "assignments", 1)) == 2
    assert lengths(store, "rollout", "traces", 1) == [3 * SIZE, SIZE]


def test_samples_are_of_the_rollouts_that_they_were_made_of_alone(origin):
    frames = Frames(open_store(origin), relations)
    rollouts = frames["rollouts"].filter(pl.col("num_samples") > 0).select("key", "trace_id").collect()
    for view in ("rollout_samples", "training_samples"):
        made = frames[view].select("key", "trace_id").collect()
        assert made.sort(pl.all()).equals(rollouts.sort(pl.all())), view


def test_the_walk_of_later_steps_does_not_move(origin, root):
    stores = rehearse(root, "base", steps=2), open_store(origin)
    tried = [{row["example_id"] for row in rows(store, "assignment", "assignments", 1)[0]} for store in stores]
    assert tried[0] == tried[1]


def test_what_is_there_after_the_last_batch_is_trained_on(monkeypatch, root):
    play_equal(monkeypatch, {"0-0", "0-2", "0.1-0", "0.1-1", "0.2-0", "0.2-1"})
    (described,) = reported(root, "base", **REFILL | {"steps": 1})
    counts = {name: described["metrics"][f"groups/{name}"] for name in ("wanted", "drawn", "admitted", "batches")}
    assert counts == {"wanted": 3, "drawn": 7, "admitted": 1, "batches": 3}
    assert described["num_traces"] == 7 * SIZE
    assert outcomes(described) == {"trained": SIZE, "filtered": 6 * SIZE}


def test_nothing_at_all_after_the_last_batch_ends_the_run(monkeypatch, root):
    play_equal(monkeypatch, {"all"})
    with pytest.raises(EmptyBatch, match="step 0: 3 batches in a row"):
        rehearse(root, "base", **REFILL)
    store = open_store(root)
    assert lengths(store, "rollout", "traces", 0) == [3 * SIZE] * 3
    assert store.runs.events("base")[-1].event == "evicted"


def test_what_is_to_come_is_taken_to_be_enough(root):
    fresh = session_for(root, "base", **REFILL)
    assert [ref.stage for ref in plan_work(fresh.context, SOURCE)].count("rollout") == 2
    die(root, "base", 6, **REFILL)
    again = session_for(root, "base", **REFILL)  # the other's ledger may be seconds old
    begun = [ref for ref in plan_work(again.context, SOURCE) if ref.step == 0]
    expected = [(computed, stage) for computed in (False, True) for stage in ("assignment", "rollout")]
    assert [(ref.computed, ref.stage) for ref in begun if ref.stage in ("rollout", "assignment")] == expected


def test_a_recorded_step_knows_all_its_assignments_and_rollouts_in_order(origin):
    store = open_store(origin)
    past = step_history(store, "base").steps[0]
    for stage in ("assignment", "rollout"):
        assert [each.key for each in past.of(stage).values()] == [each.key for each in entries(store, stage, 0)]
        assert list(past.of(stage)) == [stage, f"{stage}.1", f"{stage}.2"]
    assert list(past.work)[-1] == "training"


def test_a_replay_with_another_algorithm_credits_all_rollouts_of_a_step(origin):
    session, steps = replay(origin, overrides=[RLOO], name="branch")
    assert [sum(share["num_traces"] for share in step["outcomes"]) for step in steps] == [6 * SIZE, 4 * SIZE]
    branch = entries(session.context.store, "advantage", 0, "branch")
    assert len(branch) == 1 and branch[0].slices("samples")[0].rows == GROUPS * SIZE


"""Rollouts of the recorded assignments with groups of two, by step."""


def test_a_refused_group_is_replaced_too_and_has_no_weight(root):
    changes = {"filtering": {"filters": [{"type": "errored"}]}, "admission": {}}
    (described,) = reported(root, "base", **REFILL | changes | {"steps": 1})
    assert described["metrics"]["groups/admitted"] == 3.0 and described["metrics"]["groups/drawn"] == 6.0
    assert outcomes(described) == {"trained": 3 * SIZE, "no weight": 3 * SIZE}


@pytest.mark.parametrize("last", ["advantage", "rollout"])
def test_a_step_that_still_lacks_groups_is_not_replayed(root, last):
    """Dies in step 1 after its first batch was credited, or the second one sampled."""

    done = []

    class Dying(Rehearsal):
        def __call__(self, task, step, *arguments, **named):
            if done.count(last) == {"advantage": 1, "rollout": 2}[last]:
                raise KeyboardInterrupt
            done.extend([task.stage.name] * (step == 1))
            return super().__call__(task, step, *arguments, **named)

    session = session_for(root, "base", **REFILL)
    with pytest.raises(KeyboardInterrupt), record_run(session):
        list(loop.train_steps(Dying(session), SOURCE))
    assert list(step_history(open_store(root), "base").steps) == [0, 1]
    for begin in ("filtering", "advantage", "packing"):
        assert ask(root, from_stage=begin).replay.last_step == 1
    with pytest.raises(
        ConfigError, match="has not recorded step 1 up to stage packing, which tells that all its groups"
    ):
        ask(root, from_stage="advantage", steps="0:2")
    rehearse(root, "base", **REFILL)
    assert ask(root, from_stage="advantage", steps="0:2").steps == 2
