"""Steps that take their rollouts from a stream: what is asked of which policy, what is recorded, and crashes."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from uuid import uuid4

import pyarrow as pa
import pytest

from flows.exchange.export import RolloutChoice, chosen_rollouts
from flows.orchestration.states import GateRefused, RunCancelled
from storage.schemas.stage_tables import ASSIGNMENTS
from storage.store import open_store
from tasks.rollout import stage as rollout
from tasks.rollout.queue import RolloutQueue
from tasks.runtime.stage import Policy
from tests.fixtures import fixed
from tests.fixtures.builders import table
from tests.fixtures.histories import results
from tests.fixtures.judging import stand_in
from tests.fixtures.rehearsal import SMALL, made
from tests.fixtures.replays import RLOO, replay
from tests.fixtures.streams import Interrupted, PlayedEngine, of_steps, recorded_groups, stream

STEPS, GROUPS, BOUND = 5, 3, 2
EVERY = [f"{step}-{slot}" for step in range(STEPS) for slot in range(GROUPS)]
STREAMED = {"steps": STEPS, "rollout": {"max_off_policy_steps": BOUND}}


Change = Callable[[str, dict[str, pa.Table]], dict[str, pa.Table]]


@dataclass
class Sampling(PlayedEngine):
    """Says in which order groups end, and notes who sampled what."""

    order: Callable[[Sequence[str]], Sequence[str]] = lambda groups: groups
    die_at: str = ""
    """The group whose sampling ends the process."""
    sampled: list[tuple[str, int]] = field(default_factory=list)
    """Groups and the versions of the policies that sampled them."""
    batch: int = 1
    """Groups that are in flight together."""
    change: Change = lambda name, rows: rows
    """Says what the rollouts of a group are in place of the usual ones."""

    def run(self, groups, policy, step, on_group, plan):
        left = list(groups)
        while left and not plan.is_outdated():
            begun, left = left[: self.batch], left[self.batch :]
            for name in self.order(begun):
                if name == self.die_at:
                    raise Interrupted(name)
                self.sampled.append((name, policy.version))
                on_group(name, self.change(name, fixed.group(groups[name], policy, step)))


@pytest.fixture
def run(root, monkeypatch):
    """Go through a run with a queue, from where it stands; Prefect is asked to cancel it after so many steps."""

    def go(sampling, name="base", cancel_after=STEPS, place=root, **changes):
        def cancel(session, finished):
            if finished.step + 1 == cancel_after < STEPS:
                monkeypatch.setattr(session, "_cancellation", SimpleNamespace(asked_for=lambda run: True))

        return stream(place, monkeypatch, sampling, name, cancel, **(STREAMED | changes))

    return go


def backwards(batch=4, **changes):
    """Return a sampler whose groups end in the reverse order."""
    return Sampling(order=lambda groups: groups[::-1], batch=batch, **changes)


def intakes(store, name="base"):
    """The rows of intakes of each step, in order."""
    return [sorted(rows, key=lambda row: row["place"]) for rows in of_steps(store, "intakes", name)]


@pytest.mark.parametrize("bound", [2, 4])
def test_every_group_is_taken_once_and_none_is_older_than_the_bound(run, bound):
    store = run(backwards(), rollout={"max_off_policy_steps": bound})
    steps = intakes(store)
    assert [len(step) for step in steps] == [GROUPS] * STEPS
    assert sorted(all_groups(store)) == EVERY
    ages = [row["age"] for step in steps for row in step]
    assert min(ages) >= 0 and 1 <= max(ages) <= bound
    # They end out of order, so steps take groups that were assigned to others.
    assert any(row["assigned_step"] != step for step, rows in enumerate(steps) for row in rows)
    assert [row["place"] for row in steps[0]] == [*range(GROUPS)]
    assigned = {entry.step: entry.key for entry in results(store, "assignment")}
    for entry in results(store, "rollout"):
        rows = store.read(entry.slices("intakes")).to_pylist()
        origins = {assigned[row["assigned_step"]] for row in rows} | {row["policy_key"] for row in rows}
        assert origins <= set(entry.inputs.values()), "lineage leads to every assignment and policy"
    for step, rows in enumerate(steps):
        (traces,) = made(store, "rollout", "traces", step=step)
        groups = {row["group_id"]: row for row in rows}
        assert {trace["group_id"] for trace in traces} == groups.keys()
        for trace in traces:
            row = groups[trace["group_id"]]
            assert (trace["policy_key"], trace["policy_version"]) == (row["policy_key"], row["policy_version"])
            assert trace["staleness"] == row["age"] == step - trace["policy_version"]


def test_what_was_recorded_is_used_again_and_nothing_is_sampled(run):
    store = run(Sampling())
    before = intakes(store)
    again = backwards()
    assert intakes(run(again)) == before
    assert intakes(run(again, name="other"), "other") == before
    assert again.sampled == []


@pytest.mark.engine
@pytest.mark.parametrize("last", ["0-0", "0-2", "1-1", "2-2", "4-2"])
def test_after_a_crash_finished_groups_are_used_and_the_others_sampled(run, root, last):
    first, second = Sampling(die_at=last, batch=2), backwards(5)
    with pytest.raises(Interrupted):
        run(first)
    recorded = recorded_groups(open_store(root))
    assert set(recorded) == {group for group, _ in first.sampled}, "every finished group is safe"
    store = run(second)
    rows = [row for step in intakes(store) for row in step]
    taken = {row["group_id"]: row["policy_key"] for row in rows}
    assert sorted(all_groups(store)) == EVERY
    assert taken.items() >= recorded.items(), "a finished group is not the one that was trained on"
    assert Counter(group for group, _ in second.sampled) == Counter(taken.keys() - recorded.keys())
    assert max(row["age"] for row in rows) <= BOUND


def test_a_gate_stops_the_training_and_not_the_sampling(run):
    sampling, rule = Sampling(), {"type": "rule", "rule": "num_groups > 3"}
    with pytest.raises(GateRefused):
        run(sampling, gate=rule)
    assert {group for group, _ in sampling.sampled} <= {*EVERY[: (1 + BOUND) * GROUPS]}
    assert sorted(all_groups(run(Sampling(), gate={"type": "none"}))) == EVERY


REFILLED = {"assignment": SMALL["assignment"] | {"refill": True}}


def alike(names):
    """Let the rollouts of some groups all earn the same, so that they teach nothing."""

    def change(name, rows):
        if name not in names:
            return rows
        return {**rows, "traces": table("traces", [row | {"reward": 1.0} for row in rows["traces"].to_pylist()])}

    return change


def taken_groups(store):
    """The groups that each step took."""
    return [[row["group_id"] for row in rows] for rows in intakes(store)]


def all_groups(store):
    return [group for groups in taken_groups(store) for group in groups]


@pytest.mark.engine
@pytest.mark.parametrize("last", ["", "0-2", "0.1-0", "2-1", "3-1"])
def test_a_step_takes_further_groups_in_place_of_those_that_teach_nothing_crash_or_not(run, root, last):
    dull = {"0-0", "0-2", "0.1-1", "3-1"}
    first = Sampling(change=alike(dull), die_at=last, batch=2)
    with pytest.raises(Interrupted) if last else nullcontext():
        run(first, **REFILLED)
    recorded = recorded_groups(open_store(root)).keys()
    second = backwards(5, change=alike(dull))
    store = run(second, **REFILLED)
    taken = taken_groups(store)
    every = all_groups(store)
    assert len(every) == len(set(every)) and {*every} >= recorded
    assert not {group for group, _ in second.sampled} & recorded, "a committed group is not sampled again"
    for groups in taken:
        assert len({*groups} - dull) == GROUPS, "a step trains on as many groups as it wants"
    assert any(len(groups) > GROUPS for groups in taken)
    assert max(row["age"] for rows in of_steps(store, "intakes") for row in rows) <= BOUND


def test_a_step_of_which_nothing_is_left_takes_another_batch(run):
    sampling = Sampling(change=alike({f"0-{slot}" for slot in range(GROUPS)}))
    store = run(sampling)
    # The first batch, which was given up, is recorded beside the one that was trained on.
    assert [len(groups) for groups in taken_groups(store)] == [2 * GROUPS, *[GROUPS] * (STEPS - 1)]


def test_a_newer_policy_is_known_before_it_is_served():
    queue, known = RolloutQueue(lambda table, ref: ASSIGNMENTS.arrow.empty_table(), BOUND), []
    queue.add([], Policy("old", 0))
    queue.add([], Policy("new", 1))
    # A rollout that ends while the engine's new weights are checked names the new policy.
    queue.renew(lambda policy: known.append(dict(queue.versions)) or policy)
    assert known == [{"old": 0, "new": 1}] and queue.policy == Policy("new", 1)


def test_a_cancelled_run_keeps_its_groups_and_goes_on(run, root):
    with pytest.raises(RunCancelled):
        run(Sampling(batch=2), cancel_after=2)
    store = open_store(root)
    assert len(results(store, "training")) == 2, "the step under way is not trained"
    before = recorded_groups(store).keys()
    again = Sampling(batch=2)
    assert sorted(all_groups(run(again))) == EVERY
    assert len(before) >= 2 * GROUPS and not before & {group for group, _ in again.sampled}


def test_a_recorded_step_is_replayed_and_exported_whole(run, root):
    store = run(backwards())
    again, steps = replay(root, from_stage="filtering", overrides=[RLOO])
    assert len(steps) == STEPS
    assert intakes(store, again.context.run) == intakes(store)
    exported = list(chosen_rollouts(store, RolloutChoice("base", "keep")))
    assert [len(each.chosen) for each in exported] == [GROUPS * 4] * STEPS
    for each in exported:
        assert {trace["assignment_id"] for trace in each.traces} <= each.assignments.keys()


POOLS = {"assignment": SMALL["assignment"] | {"sampler": {"type": "difficulty_pools"}}}


def known(store, step):
    """The mean reward of each example as the assignment of a step knew it."""
    (rows,) = made(store, "assignment", "difficulties", step=step)
    return {row["example_id"]: row["reward"] for row in rows}


def test_examples_are_drawn_by_what_was_trained_on_when_they_are_assigned(run):
    store = run(backwards(), **POOLS)
    rewards = {}
    for step in range(STEPS):
        if step > BOUND:
            # Policy `step - BOUND` lets the assignment into the stream, and was trained on the step before that.
            (traces,) = made(store, "rollout", "traces", step=step - BOUND - 1)
            groups = {}
            for row in sorted(traces, key=lambda row: (len(row["group_id"]), row["group_id"], row["trace_id"])):
                groups.setdefault(row["group_id"], []).append(row)
            rewards |= {rows[0]["example_id"]: sum(r["reward"] for r in rows) / len(rows) for rows in groups.values()}
        assert known(store, step) == rewards
    assert known(store, STEPS - 1), "nothing was ever known"


@pytest.mark.engine
@pytest.mark.parametrize("last", ["0-2", "2-1", "3-2", "4-0"])
def test_a_resumed_run_draws_the_same_examples(run, tmp_path, root, last):
    # In order, so that a run that nobody stops takes the same groups, and so knows the same.
    undisturbed = run(Sampling(), place=tmp_path / "undisturbed", **POOLS)
    with pytest.raises(Interrupted):
        run(Sampling(die_at=last), **POOLS)
    before = {entry.step: entry.key for entry in open_store(root).ledger.entries(stage="assignment")}
    resumed = run(Sampling(), **POOLS)
    keys = {entry.step: entry.key for entry in results(resumed, "assignment")}
    drawn = of_steps(resumed, "assignments", stage="assignment")
    assert drawn == of_steps(undisturbed, "assignments", stage="assignment") and before.items() <= keys.items()
    run(again := Sampling(), "other", **POOLS)
    assert again.sampled == [] and of_steps(resumed, "assignments", stage="assignment") == drawn


class Counted:
    """Stands in for what reads the pages of engines: 1 for each group, and 100 after the last one of a sampler."""

    ended, value = 0, 1.0

    def __init__(self, models):
        pass

    @contextmanager
    def measure(self):
        yield
        Counted.ended += 1
        self.value = 100.0

    def load(self, url):
        return 0.0, 0.0

    def take(self):
        return table(
            "engine_metrics", [{"interval": uuid4().hex, "engine": 0, "name": "requests", "value": self.value}]
        )


def test_what_engines_count_goes_with_the_groups(run, monkeypatch):
    monkeypatch.setattr(rollout, "EngineMetrics", Counted)
    store = run(Sampling(), engine={"metrics": True})
    steps = of_steps(store, "engine_metrics")
    values = Counter(row["value"] for step in steps for row in step)
    assert len(steps) == STEPS and all(steps) and values[1.0] == STEPS * GROUPS
    assert 0 < values[100.0] <= Counted.ended, "what was counted at the end of a turn goes with a group of the next"


def test_a_step_of_a_stream_is_judged_when_it_has_its_groups(run, root):
    with stand_in() as server:
        judge = {"name": "kind", "url": server.url, "model": "grader", "version": "grader", "prompt": "{transcript}"}
        run(backwards(), judges=[judge])
        run(backwards(), judges=[judge])  # all of it is there
    rewards = recorded(root, "judging")
    assert len(rewards) == STEPS and all('"kind"' in row for rows in rewards for row in rows)


def recorded(root, stage):
    """The named rewards of the traces that a stage made, by step."""
    store = open_store(root)
    entries = store.ledger.entries(run="base", stage=stage)
    return [store.read(entry.slices("traces"), ["rewards"])["rewards"].to_pylist() for entry in entries]
