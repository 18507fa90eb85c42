"""Steps that take their rollouts from a stream: what is asked of which policy, what is recorded, and crashes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from flows.exchange.export import RolloutChoice, chosen_rollouts
from flows.orchestration.states import GateRefused, RunCancelled
from flows.runtime import loop
from flows.runtime.records import FinishedStep
from flows.runtime.session import Session, record_run
from storage.schemas.stage_tables import ASSIGNMENTS, ENGINE_METRICS, EXAMPLES
from storage.store import Store, open_store
from tasks.inference.sampling.sampler import SamplingPlan
from tasks.rollout import stage as rollout
from tasks.rollout.queue import RolloutQueue
from tasks.runtime.stage import Policy
from tests.fixtures import fixed
from tests.fixtures.rehearsal import SMALL, Streaming, made, play, session_for
from tests.fixtures.replays import RLOO, ask, walk
from tests.fixtures.streams import Interrupted, of_steps, stream

STEPS, GROUPS, BOUND = 5, 3, 2
STREAMED: dict[str, Any] = {"steps": STEPS, "rollout": {"max_off_policy_steps": BOUND}}


Change = Callable[[str, dict[str, pa.Table]], dict[str, pa.Table]]


@dataclass
class Sampling(fixed.Services):
    """Stands in for the engine and the sampler: says in which order groups end, and notes who sampled what."""

    order: Callable[[Sequence[str]], Sequence[str]] = lambda groups: groups
    die_at: str = ""
    """The group whose sampling ends the process."""
    sampled: list[tuple[str, int]] = field(default_factory=list)
    """Groups and the versions of the policies that sampled them."""
    batch: int = 1
    """Groups that are in flight together."""
    change: Change = lambda name, rows: rows
    """Says what the rollouts of a group are in place of the usual ones."""

    def sampler(self, *, policy: Policy, step: int, on_group: Any, plan: SamplingPlan, **_: Any) -> Any:
        sampling = self

        class Sampler:
            def sample(self, assignments: pa.Table, examples: pa.Table) -> None:
                groups = fixed.groups(assignments)
                left = list(groups)
                while left and not plan.is_outdated():
                    begun, left = left[: sampling.batch], left[sampling.batch :]
                    for name in sampling.order(begun):
                        if name == sampling.die_at:
                            raise Interrupted(name)
                        sampling.sampled.append((name, policy.version))
                        on_group(name, sampling.change(name, fixed.group(groups[name], policy, step)))

        return Sampler()


def run(
    root: Path,
    patch: pytest.MonkeyPatch,
    sampling: Sampling,
    name: str = "base",
    cancel_after: int = STEPS,
    **changes: Any,
) -> Store:
    """Go through a run with a queue; Prefect is asked to cancel it after so many steps."""

    def cancel(session: Session, finished: FinishedStep) -> None:
        if finished.step + 1 == cancel_after < STEPS:
            patch.setattr(session, "_cancellation", SimpleNamespace(asked_for=lambda run: True))

    return stream(root, patch, sampling, name, cancel, **(STREAMED | changes))


def intakes(store: Store, name: str = "base") -> list[list[dict[str, Any]]]:
    """The rows of intakes of each step, in order."""
    return [sorted(rows, key=lambda row: row["place"]) for rows in of_steps(store, "intakes", name)]


@pytest.mark.parametrize("bound", [2, 4])
def test_every_group_is_taken_once_and_none_is_older_than_the_bound(tmp_path, monkeypatch, bound):
    sampling = Sampling(order=lambda groups: groups[::-1], batch=4)
    store = run(tmp_path / "store", monkeypatch, sampling, rollout={"max_off_policy_steps": bound})
    steps = intakes(store)
    assert [len(step) for step in steps] == [GROUPS] * STEPS
    assert sorted(row["group_id"] for step in steps for row in step) == sorted(
        f"{step}-{slot}" for step in range(STEPS) for slot in range(GROUPS)
    )
    ages = [row["age"] for step in steps for row in step]
    assert min(ages) >= 0 and 1 <= max(ages) <= bound
    # They end out of order, so steps take groups that were assigned to others.
    assert any(row["assigned_step"] != step for step, rows in enumerate(steps) for row in rows)
    assert [row["place"] for row in steps[0]] == [*range(GROUPS)]
    assigned = {entry.step: entry.key for entry in store.ledger.entries(run="base", stage="assignment")}
    for entry in store.ledger.entries(run="base", stage="rollout"):
        rows = store.read(entry.slices("intakes")).to_pylist()
        origins = {key for row in rows for key in (assigned[row["assigned_step"]], row["policy_key"])}
        assert origins <= set(entry.inputs.values()), "lineage leads to every assignment and policy"
    for step, rows in enumerate(steps):
        (traces,) = made(store, "rollout", "traces", step=step)
        groups = {row["group_id"]: row for row in rows}
        assert {trace["group_id"] for trace in traces} == groups.keys()
        for trace in traces:
            row = groups[trace["group_id"]]
            assert (trace["policy_key"], trace["policy_version"]) == (row["policy_key"], row["policy_version"])
            assert trace["staleness"] == row["age"] == step - trace["policy_version"]


def test_what_was_recorded_is_used_again_and_nothing_is_sampled(tmp_path, monkeypatch):
    store = run(tmp_path / "store", monkeypatch, Sampling())
    before = intakes(store)
    again = Sampling(order=lambda groups: groups[::-1], batch=4)
    assert intakes(run(tmp_path / "store", monkeypatch, again)) == before
    assert intakes(run(tmp_path / "store", monkeypatch, again, name="other"), "other") == before
    assert again.sampled == []


@pytest.mark.engine
@pytest.mark.parametrize("last", ["0-0", "0-2", "1-1", "2-2", "4-2"])
def test_after_a_crash_finished_groups_are_used_and_the_others_sampled(tmp_path, monkeypatch, last):
    first, second = Sampling(die_at=last, batch=2), Sampling(order=lambda groups: groups[::-1], batch=5)
    with pytest.raises(Interrupted):
        run(tmp_path / "store", monkeypatch, first)
    store = open_store(tmp_path / "store")
    rows = store.scan("intakes").collect()
    recorded = {} if rows.is_empty() else dict(zip(rows["group_id"], rows["policy_key"], strict=True))
    assert set(recorded) == {group for group, _ in first.sampled}, "every finished group is safe"
    steps = intakes(run(tmp_path / "store", monkeypatch, second))
    taken = {row["group_id"]: row["policy_key"] for step in steps for row in step}
    assert len(taken) == sum(map(len, steps)) == STEPS * GROUPS
    assert taken.items() >= recorded.items(), "a finished group is not the one that was trained on"
    assert Counter(group for group, _ in second.sampled) == Counter(taken.keys() - recorded.keys())
    assert max(row["age"] for step in steps for row in step) <= BOUND


def test_a_gate_stops_the_training_and_not_the_sampling(tmp_path, monkeypatch):
    sampling, rule = Sampling(), {"type": "rule", "rule": "num_groups > 3"}
    with pytest.raises(GateRefused):
        run(tmp_path / "store", monkeypatch, sampling, gate=rule)
    assert {group for group, _ in sampling.sampled} <= {f"{s}-{k}" for s in range(1 + BOUND) for k in range(GROUPS)}
    store = run(tmp_path / "store", monkeypatch, Sampling(), gate={"type": "none"})
    assert sum(map(len, intakes(store))) == STEPS * GROUPS


REFILLED: dict[str, Any] = {"assignment": SMALL["assignment"] | {"refill": True}}


def alike(names: set[str]) -> Change:
    """Let the rollouts of some groups all earn the same, so that they teach nothing."""

    def change(name: str, rows: dict[str, pa.Table]) -> dict[str, pa.Table]:
        traces = rows["traces"]
        ones = pa.array([1.0] * traces.num_rows, pa.float64())
        changed = traces.set_column(traces.schema.get_field_index("reward"), traces.schema.field("reward"), ones)
        return {**rows, "traces": changed} if name in names else rows

    return change


def taken_groups(store: Store) -> list[list[str]]:
    """The groups that each step took."""
    return [[row["group_id"] for row in rows] for rows in of_steps(store, "intakes")]


@pytest.mark.engine
@pytest.mark.parametrize("last", ["", "0-2", "0.1-0", "2-1", "3-1"])
def test_a_step_takes_further_groups_in_place_of_those_that_teach_nothing_crash_or_not(tmp_path, monkeypatch, last):
    root, dull = tmp_path / "store", {"0-0", "0-2", "0.1-1", "3-1"}
    first = Sampling(change=alike(dull), die_at=last, batch=2)
    with pytest.raises(Interrupted) if last else nullcontext():
        run(root, monkeypatch, first, **REFILLED)
    rows = open_store(root).scan("intakes").collect()
    recorded = set() if rows.is_empty() else {*rows["group_id"]}
    second = Sampling(change=alike(dull), order=lambda groups: groups[::-1], batch=5)
    store = run(root, monkeypatch, second, **REFILLED)
    taken = taken_groups(store)
    every = [group for groups in taken for group in groups]
    assert len(every) == len(set(every)) and {*every} >= recorded
    assert not {group for group, _ in second.sampled} & recorded, "a committed group is not sampled again"
    for groups in taken:
        assert len({*groups} - dull) == GROUPS, "a step trains on as many groups as it wants"
    assert any(len(groups) > GROUPS for groups in taken)
    assert max(row["age"] for rows in of_steps(store, "intakes") for row in rows) <= BOUND


def test_a_step_of_which_nothing_is_left_takes_another_batch(tmp_path, monkeypatch):
    sampling = Sampling(change=alike({f"0-{slot}" for slot in range(GROUPS)}))
    store = run(tmp_path / "store", monkeypatch, sampling)
    # The first batch, which was given up, is recorded beside the one that was trained on.
    assert [len(groups) for groups in taken_groups(store)] == [2 * GROUPS, *[GROUPS] * (STEPS - 1)]


def test_a_step_says_how_full_the_engine_was_who_waited_and_how_old_its_tokens_are(tmp_path, monkeypatch):
    store = run(tmp_path / "store", monkeypatch, Sampling(order=lambda groups: groups[::-1], batch=4))
    loads, measured = of_steps(store, "intake_loads"), of_steps(store, "metrics", stage="metrics")
    traces = of_steps(store, "traces")
    for step in range(STEPS):
        found = {row["name"]: row["value"] for row in measured[step] if row["name"].startswith("stream/")}
        seconds = sum(row["seconds"] for row in loads[step])
        assert found["stream/seconds"] == pytest.approx(seconds)
        waited = sum(row["learner_waited_seconds"] for row in loads[step])
        assert found["stream/learner_waited"] == pytest.approx(waited / seconds)
        assert found["stream/engine_idle"] == pytest.approx(1), "no rollout was counted: sampling is played"
        ages = Counter[int]()
        for trace in traces[step]:
            ages[trace["staleness"]] += trace["num_output_tokens"]
        assert found["stream/token_age/max"] == max(ages)
        shares = {int(name.rpartition("/")[2]): value for name, value in found.items() if "tokens_of_age" in name}
        assert shares == {age: pytest.approx(count / ages.total()) for age, count in ages.items()}


def test_a_newer_policy_is_known_before_it_is_served():
    queue, known = RolloutQueue(lambda table, ref: ASSIGNMENTS.arrow.empty_table(), BOUND), list[dict[str, int]]()
    queue.add([], Policy("old", 0))
    queue.add([], Policy("new", 1))
    # A rollout that ends while the engine's new weights are checked names the new policy.
    queue.renew(lambda policy: known.append(dict(queue.versions)) or policy)
    assert known == [{"old": 0, "new": 1}] and queue.policy == Policy("new", 1)


def test_a_cancelled_run_keeps_its_groups_and_goes_on(tmp_path, monkeypatch):
    root = tmp_path / "store"
    with pytest.raises(RunCancelled):
        run(root, monkeypatch, Sampling(batch=2), cancel_after=2)
    store = open_store(root)
    before, trained = {*store.scan("intakes").collect()["group_id"]}, store.ledger.entries(run="base", stage="training")
    assert len(list(trained)) == 2, "the step under way is not trained"
    again = Sampling(batch=2)
    every = [group for groups in taken_groups(run(root, monkeypatch, again)) for group in groups]
    assert len(every) == len(set(every)) == STEPS * GROUPS
    assert len(before) >= 2 * GROUPS and not before & {group for group, _ in again.sampled}


def test_every_policy_is_evaluated_beside_a_stream_as_without_one(tmp_path, monkeypatch):
    sampling = Sampling(batch=2)
    monkeypatch.setattr(rollout, "BatchSampler", sampling.sampler)
    monkeypatch.setattr(loop, "Executor", Streaming)
    rows = fixed.examples().to_pylist()
    held_out = [row | {"example_id": f"held out {row['example_id']}", "split": "eval"} for row in rows[:4]]
    listed = pa.Table.from_pylist(rows + held_out, EXAMPLES.arrow)
    play(monkeypatch, examples=lambda tables, view: {"examples": listed})
    outcomes, tried = [], []
    for bound in (0, BOUND):
        evaluation = {"num_examples": 2, "attempts": 2, "every": 1}
        changes: dict[str, Any] = STREAMED | {"rollout": {"max_off_policy_steps": bound}, "evaluation": evaluation}
        session = session_for(tmp_path / f"store-{bound}", "base", **changes)
        services: Any = {"engine": sampling, "environments": sampling}
        session.services = replace(session.services, **services)
        with record_run(session):
            outcomes.append(loop.loop_train(session))
        store = session.context.store
        tried.append({entry.key for entry in store.ledger.entries(run="base", stage="evaluation_assignment")})
    assert [[each["version"] for each in outcome["evaluations"]] for outcome in outcomes] == [[*range(STEPS + 1)]] * 2
    assert tried[0] == tried[1], "the same examples with the same seeds"
    taken = [group for groups in taken_groups(store) for group in groups]
    assert len(taken) == len(set(taken)) == STEPS * GROUPS, "no rollout of an evaluation is in a step"


def test_a_recorded_step_is_replayed_and_exported_whole(tmp_path, monkeypatch):
    root = tmp_path / "store"
    store = run(root, monkeypatch, Sampling(order=lambda groups: groups[::-1], batch=4))
    again, steps = walk(ask(root, from_stage="filtering", overrides=[RLOO]))
    assert len(steps) == STEPS
    assert intakes(store, again.context.run) == intakes(store)
    exported = list(chosen_rollouts(store, RolloutChoice("base", "keep")))
    assert [len(each.chosen) for each in exported] == [GROUPS * 4] * STEPS
    for each in exported:
        assert {trace["assignment_id"] for trace in each.traces} <= each.assignments.keys()


POOLS: dict[str, Any] = {"assignment": SMALL["assignment"] | {"sampler": {"type": "difficulty_pools"}}}


def known(store: Store, step: int) -> dict[str, float]:
    """The mean reward of each example as the assignment of a step knew it."""
    (rows,) = made(store, "assignment", "difficulties", step=step)
    return {row["example_id"]: row["reward"] for row in rows}


def test_examples_are_drawn_by_what_was_trained_on_when_they_are_assigned(tmp_path, monkeypatch):
    store = run(tmp_path / "store", monkeypatch, Sampling(order=lambda groups: groups[::-1], batch=4), **POOLS)
    rewards: dict[str, float] = {}
    for step in range(STEPS):
        if step > BOUND:
            # Policy `step - BOUND` lets the assignment into the stream, and was trained on the step before that.
            (traces,) = made(store, "rollout", "traces", step=step - BOUND - 1)
            groups: dict[str, list[float]] = {}
            for row in sorted(traces, key=lambda row: (len(row["group_id"]), row["group_id"], row["trace_id"])):
                groups.setdefault(row["group_id"], []).append(row["reward"])
            examples = {row["group_id"]: row["example_id"] for row in traces}
            rewards |= {examples[group]: sum(own) / len(own) for group, own in groups.items()}
        assert known(store, step) == rewards
    assert known(store, STEPS - 1), "nothing was ever known"


@pytest.mark.engine
@pytest.mark.parametrize("last", ["0-2", "2-1", "3-2", "4-0"])
def test_a_resumed_run_draws_the_same_examples(tmp_path, monkeypatch, last):
    # In order, so that a run that nobody stops takes the same groups, and so knows the same.
    undisturbed = run(tmp_path / "undisturbed", monkeypatch, Sampling(), **POOLS)
    with pytest.raises(Interrupted):
        run(tmp_path / "store", monkeypatch, Sampling(die_at=last), **POOLS)
    before = {entry.step: entry.key for entry in open_store(tmp_path / "store").ledger.entries(stage="assignment")}
    resumed = run(tmp_path / "store", monkeypatch, Sampling(), **POOLS)
    drawn, keys = (
        (of_steps(store, "assignments", stage="assignment") for store in (undisturbed, resumed)),
        {entry.step: entry.key for entry in resumed.ledger.entries(run="base", stage="assignment")},
    )
    first, second = drawn
    assert first == second and before.items() <= keys.items()
    run(tmp_path / "store", monkeypatch, again := Sampling(), "other", **POOLS)
    assert again.sampled == [] and of_steps(resumed, "assignments", stage="assignment") == first


class Counted:
    """Stands in for what reads the pages of engines: 1 for each group, and 100 after the last one of a sampler."""

    ended = 0

    def __init__(self, models: Any) -> None:
        pass

    @contextmanager
    def measure(self) -> Iterator[None]:
        yield
        Counted.ended += 1

    def take(self, value: float = 1.0) -> pa.Table:
        row = {"interval": uuid4().hex, "engine": 0, "name": "requests", "value": value}
        return pa.Table.from_pylist([row], schema=ENGINE_METRICS.arrow)

    def table(self) -> pa.Table:
        return self.take(100.0)


def test_what_engines_count_goes_with_the_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "EngineMetrics", Counted)
    store = run(tmp_path / "store", monkeypatch, Sampling(), engine={"metrics": True})
    steps = of_steps(store, "engine_metrics")
    values = Counter(row["value"] for step in steps for row in step)
    assert len(steps) == STEPS and all(steps) and values[1.0] == STEPS * GROUPS
    assert 0 < values[100.0] <= Counted.ended, "what was counted at the end of a turn goes with a group of the next"
