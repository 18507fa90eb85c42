"""Steps that take their rollouts from a stream: what is asked of which policy, what is recorded, and crashes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from flows.exchange.export_rows import RolloutChoice, chosen_rollouts
from flows.orchestration.states import GateRefused
from flows.runtime import pipeline
from flows.runtime.loops import begin_in_thread
from flows.runtime.session import record_run
from flows.runtime.step_report import check_account, finish_step
from storage.store import Store, open_store
from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling.rollouts import SamplingPlan
from tasks.rollout import intake
from tasks.rollout import stage as rollout
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Policy, Ref
from tests.fixtures import fixed
from tests.fixtures.rehearsal import SOURCE, Played, Rehearsal, made, session_for
from tests.fixtures.replays import RLOO, ask, walk

STEPS, GROUPS, BOUND = 5, 3, 2
STREAMED: dict[str, Any] = {"steps": STEPS, "rollout": {"max_off_policy_steps": BOUND}}


class Interrupted(BaseException):
    """A process that ends in the middle of sampling."""


@dataclass
class Sampling:
    """Stands in for the engine and the sampler: says in which order groups end, and notes who sampled what."""

    order: Callable[[Sequence[str]], Sequence[str]] = lambda groups: groups
    die_at: str = ""
    """The group whose sampling ends the process."""
    sampled: list[tuple[str, int]] = field(default_factory=list)
    """Groups and the versions of the policies that sampled them."""
    batch: int = 1
    """Groups that are in flight together."""

    def addresses(self) -> dict[str, str]:
        return {}

    def sharing(self, alone: bool) -> Any:
        return nullcontext()

    @contextmanager
    def pinned(self, policy: Policy) -> Iterator[ServedModel]:
        yield ServedModel("http://127.0.0.1:9", "no key")

    def sampler(self, *, policy: Policy, step: int, on_group: Any, plan: SamplingPlan, **_: Any) -> Any:
        sampling = self

        class Sampler:
            def sample(self, assignments: pa.Table, examples: pa.Table) -> None:
                groups = fixed.groups(assignments)
                left = list(groups)
                while left and not plan.outdated():
                    begun, left = left[: sampling.batch], left[sampling.batch :]
                    for name in sampling.order(begun):
                        if name == sampling.die_at:
                            raise Interrupted(name)
                        sampling.sampled.append((name, policy.version))
                        on_group(name, fixed.group(groups[name], policy, step))

        return Sampler()


class Streaming(Rehearsal):
    """Does stages as in a run; the learner alone is played."""

    def __call__(self, task: StageTask, *arguments: Any, **named: Any) -> Ref:
        if task is intake.task:
            return super(Rehearsal, self).__call__(Played(intake.STAGE), *arguments, **named)
        return super().__call__(task, *arguments, **named)


def run(root: Path, patch: pytest.MonkeyPatch, sampling: Sampling, name: str = "base", **changes: Any) -> Store:
    """Go through a run whose steps take their rollouts from a stream, from where it stands, or up to its death."""
    patch.setattr(rollout, "BatchSampler", sampling.sampler)
    session = session_for(root, name, **(STREAMED | changes))
    services: Any = {"engine": sampling, "environments": sampling}
    session.services = replace(session.services, **services)
    with ThreadPoolExecutor(1) as threads, record_run(session):
        check = lambda batch: check_account(session, batch)  # noqa: E731
        for finished in pipeline.run_steps(Streaming(session), SOURCE, check=check, begin=begin_in_thread(threads)):
            finish_step(session, finished)
    return session.context.store


def intakes(store: Store, name: str = "base") -> list[list[dict[str, Any]]]:
    """The rows of intakes of each step, in order."""
    steps = store.ledger.entries(run=name, stage="rollout")
    found = {each.step: store.read(each.slices("intakes")).to_pylist() for each in steps if not each.part}
    return [sorted(found[step], key=lambda row: row["place"]) for step in sorted(found)]


@pytest.mark.parametrize("bound", [2, 4])
def test_every_group_is_taken_once_and_none_is_older_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
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
    for step, rows in enumerate(steps):
        (traces,) = made(store, "rollout", "traces", step=step)
        groups = {row["group_id"]: row for row in rows}
        assert {trace["group_id"] for trace in traces} == groups.keys()
        for trace in traces:
            row = groups[trace["group_id"]]
            assert (trace["policy_key"], trace["policy_version"]) == (row["policy_key"], row["policy_version"])
            assert trace["staleness"] == row["age"] == step - trace["policy_version"]


def test_lineage_leads_to_every_assignment_and_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run(tmp_path / "store", monkeypatch, Sampling(order=lambda groups: groups[::-1], batch=4))
    assigned = {entry.step: entry.key for entry in store.ledger.entries(run="base", stage="assignment")}
    for entry in store.ledger.entries(run="base", stage="rollout"):
        keys = set(entry.inputs.values())
        for row in store.read(entry.slices("intakes")).to_pylist():
            assert {assigned[row["assigned_step"]], row["policy_key"]} <= keys


def test_what_was_recorded_is_used_again_and_nothing_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run(tmp_path / "store", monkeypatch, Sampling())
    before = intakes(store)
    again = Sampling(order=lambda groups: groups[::-1], batch=4)
    assert intakes(run(tmp_path / "store", monkeypatch, again)) == before
    assert intakes(run(tmp_path / "store", monkeypatch, again, name="other"), "other") == before
    assert again.sampled == []


@pytest.mark.parametrize("last", ["0-0", "0-2", "1-1", "2-2", "4-2"])
def test_after_a_crash_finished_groups_are_used_and_the_others_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
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


def test_a_longer_run_goes_on_from_the_shorter_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = intakes(run(tmp_path / "store", monkeypatch, Sampling(batch=3), steps=3))
    longer = intakes(run(tmp_path / "store", monkeypatch, Sampling(batch=3), steps=STEPS))
    assert longer[:3] == short and len(longer) == STEPS


def test_a_gate_stops_the_training_and_not_the_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, rule = Sampling(), {"type": "rule", "rule": "num_groups > 3"}
    with pytest.raises(GateRefused):
        run(tmp_path / "store", monkeypatch, sampling, gate=rule)
    assert {group for group, _ in sampling.sampled} <= {f"{s}-{k}" for s in range(1 + BOUND) for k in range(GROUPS)}
    store = run(tmp_path / "store", monkeypatch, Sampling(), gate={"type": "none"})
    assert sum(map(len, intakes(store))) == STEPS * GROUPS


def test_a_recorded_step_is_replayed_and_exported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "store"
    store = run(root, monkeypatch, Sampling(order=lambda groups: groups[::-1], batch=4))
    again, steps = walk(ask(root, from_stage="filtering", overrides=[RLOO]))
    assert len(steps) == STEPS
    assert intakes(store, again.context.run) == intakes(store)
    exported = list(chosen_rollouts(store, RolloutChoice(run="base", kept=True)))
    assert [len(each.chosen) for each in exported] == [GROUPS * 4] * STEPS
    for each in exported:
        assert {trace["assignment_id"] for trace in each.traces} <= each.assignments.keys()
