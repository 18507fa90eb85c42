"""Weights that are exchanged under the rollouts of a stream: ages, tokens of several policies, crashes, replays."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.run import View
from flows.queries.row_lineage import find_rows, traverse
from storage.read.frames import Frames
from storage.store import Store, open_store
from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.inference.sampling.sampler import SamplingPlan
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Attempt, Outputs, Policy, Stage
from tests.fixtures import fixed
from tests.fixtures.builders import table
from tests.fixtures.rehearsal import SMALL, STAND_INS
from tests.fixtures.replays import RLOO, ask, walk
from tests.fixtures.streams import Interrupted, of_steps, stream

STEPS, GROUPS, BOUND = 6, 3, 2
LAST = STEPS - 1 - BOUND
"""The version of the last policy that the stream is given."""


@dataclass
class Running:
    """A group that is being sampled: its assignments, and the policies that have sampled it so far."""

    members: list[dict[str, Any]]
    policies: list[Policy]

    @property
    def has_ended(self) -> bool:
        is_slow = self.members[0]["group_id"].endswith("-0")
        return not is_slow or len(self.policies) > 1 or self.policies[-1].version == LAST


@dataclass
class Exchanging(fixed.Services):
    """Stands in for engine and sampler: groups end at once, but the first of each step when a newer policy is there."""

    losses: int = 0
    """How often the engine is lost while weights are exchanged, with all that is under way."""
    refusals: int = 0
    """How often somebody else has the engine's next turn."""
    hanging: Callable[[str], bool] = lambda name: False
    """Says which groups never end by themselves."""
    die_at: str = ""
    """`exchange`, `exchanged` or a group whose end ends the process."""
    sampled: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    exchanged: list[int] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)

    def exchange(self, policy: Policy, *, recompute: bool) -> ServedModel | None:
        self._die("exchange")
        self.losses -= 1
        if self.losses >= 0:
            raise ServiceLost(
                "the engine", self.served.url, "killed"
            )  # as the sampler makes it of what its client raises
        self.refusals -= 1
        if self.refusals >= 0:
            return None
        self.exchanged.append(policy.version)
        self.kept.append(not recompute)
        return self.served

    def _die(self, moment: str) -> None:
        if moment == self.die_at:
            raise Interrupted(moment)

    def sampler(self, *, policy: Policy, step: int, on_group: Any, plan: SamplingPlan, **_: Any) -> Any:
        outer = self

        class Sampler:
            def sample(self, assignments: pa.Table, examples: pa.Table) -> None:
                outer.run(fixed.groups(assignments), policy, step, on_group, plan)

        return Sampler()

    def run(self, left: dict[str, Any], policy: Policy, step: int, on_group: Any, plan: SamplingPlan) -> None:
        running: dict[str, Running] = {}
        while running or (left and not plan.is_outdated()):
            if plan.is_outdated():
                left = {}
                if plan.weight_update == "abort":
                    return
                if renewal := plan.update_weights() if plan.weight_update == "keep" else None:
                    self._die("exchanged")
                    policy, left = renewal.policy, fixed.groups(renewal.assignments)
                    assert not left.keys() & running.keys(), "a group that is under way is not pending"
                    for each in running.values():
                        each.policies.append(policy)
            for name in plan.find_dropped([*running]):
                self.stopped.append(name)
                del running[name]
            while left and len(running) < 8:
                name = next(iter(left))
                running[name] = Running(left.pop(name), [policy])
                self.begun.append(name)
                plan.begin(name, ())
            for name, each in [*running.items()]:
                if each.has_ended and not self.hanging(name):
                    self._die(name)
                    del running[name]
                    self.sampled.append(name)
                    on_group(name, rows(each, step))
            time.sleep(0.002)


def rows(group: Running, step: int) -> Mapping[str, pa.Table]:
    """The rows of a group: the first token of each reply is the oldest policy's, the last one the newest's."""
    tables = fixed.group(group.members, group.policies[0], step)
    if len(group.policies) == 1:
        return tables
    first, *_, last = group.policies
    runs = []
    for message in tables["messages"].to_pylist():
        if message["sampled"]:
            parts = [(0, 1, first), (1, len(message["token_ids"]) - 1, last)]
            runs += [
                {"trace_id": message["trace_id"], "message": message["message"], "start": start, "num_tokens": count}
                | {"policy_key": policy.key, "policy_version": policy.version}
                for start, count, policy in parts
            ]
    return {**tables, "token_policies": table("token_policies", runs)}


def run(
    root: Path,
    patch: pytest.MonkeyPatch,
    sampling: Exchanging,
    update: str = "keep",
    oversampling: float = 1.0,
    **rollouts: Any,
) -> Store:
    """Go through a run whose weights are exchanged under its rollouts, from where it stands, or up to its death."""
    settings = {"max_off_policy_steps": BOUND, "weight_update": update, **rollouts}
    assigned = SMALL["assignment"] | ({"oversampling": oversampling} if oversampling > 1 else {})
    return stream(root, patch, sampling, steps=STEPS, rollout=settings, assignment=assigned)


@pytest.mark.parametrize("refusals", [0, 3])
def test_rollouts_under_way_go_on_and_no_token_is_older_than_the_bound(tmp_path, monkeypatch, refusals):
    sampling = Exchanging(refusals=refusals)
    store = run(tmp_path / "store", monkeypatch, sampling, recompute_states=False)
    assert sampling.exchanged and all(sampling.kept)
    groups = [row for step in of_steps(store, "intakes") for row in step]
    assert sorted(row["group_id"] for row in groups) == sorted(sampling.sampled) == sorted(sampling.begun)
    assert len(groups) == len({row["group_id"] for row in groups}) == STEPS * GROUPS
    runs = of_steps(store, "token_policies")
    assert sum(map(len, runs)), "no rollout has tokens of several policies"
    for step, (traces, of_step) in enumerate(zip(of_steps(store, "traces"), runs, strict=True)):
        versions: dict[str, set[int]] = {}
        for each in of_step:
            versions.setdefault(each["trace_id"], set()).add(each["policy_version"])
        assert all(0 <= row["staleness"] == step - row["policy_version"] <= BOUND for row in traces)
        own = {row["trace_id"]: row for row in traces}
        for name, several in versions.items():
            assert len(several) > 1 and own[name]["policy_version"] == min(several)
            assert max(several) <= step


def with_policies(stage: Stage, version: Callable[[int], int]) -> Stage:
    """A stand-in for a stage that makes a policy, which also leaves the row of that."""

    def make(attempt: Attempt, config: View) -> Outputs:
        (attempt.directory / "model.safetensors").write_text(attempt.key)
        row = {"policy_key": attempt.key, "version": version(attempt.step), "parent_key": None}
        row |= {"weights_sha256": attempt.key}
        row |= {"has_optimizer": False, "probe_token_ids": [], "probe_logprobs": []}
        return {**stage.function(attempt, config), "policies": table("policies", [row])}

    return replace(stage, writes=(*stage.writes, "policies"), function=make)


def test_lineage_leads_from_a_gradient_to_every_policy_that_sampled_a_part(tmp_path, monkeypatch):
    versions: dict[str, Callable[[int], int]] = {"training": lambda step: step + 1, "policy_import": lambda step: 0}
    for name, version in versions.items():
        monkeypatch.setitem(STAND_INS, name, with_policies(STAND_INS[name], version))
    store = run(tmp_path / "store", monkeypatch, Exchanging())
    frames = Frames(store)
    several = 0
    for work in frames.graph.makers("batches"):
        found = find_rows(frames, "row", [work])
        above = traverse(frames, found, up=True).facts.items()
        reached = {facts["policy_key"] for node, facts in above if node.kind == "policy"}
        (sampled,) = frames.graph.sources(work, "traces")
        of_traces = {node.id: facts["policy_key"] for node, facts in above if node.kind == "trace"}
        expected = set(of_traces.values())
        if "token_policies" in sampled.tables:
            runs = frames.rows([sampled], "token_policies").collect().to_dicts()
            expected |= {run["policy_key"] for run in runs if run["trace_id"] in of_traces}
        assert reached == expected
        several += len(expected) > len(set(of_traces.values()))
    assert several, "no step has a policy that only a part of a rollout leads to"


def test_what_was_under_way_when_the_engine_was_lost_is_sampled_again(tmp_path, monkeypatch):
    sampling = Exchanging(losses=2)
    groups = [row for step in of_steps(run(tmp_path / "store", monkeypatch, sampling), "intakes") for row in step]
    assert len(groups) == len({row["group_id"] for row in groups}) == STEPS * GROUPS
    assert sorted(sampling.sampled) == sorted(set(sampling.begun)) and len(sampling.begun) > len(sampling.sampled)
    assert sampling.losses < 0 and max(row["age"] for row in groups) <= BOUND


@pytest.mark.engine
@pytest.mark.parametrize(
    ("moment", "update"),
    [("exchange", "keep"), ("exchanged", "keep"), ("1-0", "keep"), ("3-0", "keep"), ("1-1", "abort"), ("3-0", "abort")],
)
def test_after_a_crash_nothing_is_lost_and_nothing_twice(tmp_path, monkeypatch, moment, update):
    with pytest.raises(Interrupted):
        run(tmp_path / "store", monkeypatch, Exchanging(die_at=moment), update)
    store = open_store(tmp_path / "store")
    found = store.scan("intakes").collect()
    recorded = {} if found.is_empty() else dict(zip(found["group_id"], found["policy_key"], strict=True))
    again = Exchanging()
    groups = [row for step in of_steps(run(tmp_path / "store", monkeypatch, again, update), "intakes") for row in step]
    taken = {row["group_id"]: row["policy_key"] for row in groups}
    assert len(taken) == len(groups) == STEPS * GROUPS
    assert taken.items() >= recorded.items(), "a finished group is not the one that was trained on"
    assert Counter(again.sampled) == Counter(taken.keys() - recorded.keys())
    assert max(row["age"] for row in groups) <= BOUND


def test_dropped_groups_are_sampled_again_with_one_policy_each(tmp_path, monkeypatch):
    sampling = Exchanging()
    store = run(tmp_path / "store", monkeypatch, sampling, "abort")
    assert sorted(sampling.sampled) == sorted(set(sampling.begun)) and len(sampling.begun) > len(sampling.sampled)
    assert sampling.exchanged == [] and not any(of_steps(store, "token_policies"))
    assert max(row["age"] for step in of_steps(store, "intakes") for row in step) <= BOUND


LONG = {"0-0", "1-1"}
"""Groups that last longer than any step waits."""


def check_taken(store: Store) -> dict[str, dict[str, Any]]:
    """Check that each step has its groups, none too old and none twice; return the groups that were stale, by id."""
    taken = of_steps(store, "intakes")
    assert [len(rows) for rows in taken] == [GROUPS] * STEPS
    groups = [row["group_id"] for rows in taken for row in rows]
    assert max(row["age"] for rows in taken for row in rows) <= BOUND
    stale = of_steps(store, "stale_groups")
    found = {row["group_id"]: row for rows in stale for row in rows}
    assert len(found) == sum(map(len, stale)) and len({*groups, *found}) == len(groups) + len(found)
    for step, rows in enumerate(stale):
        versions = [row["policy_version"] for row in rows if row["policy_version"] is not None]
        assert all(step - version >= BOUND for version in versions)
        lost = {row["group_id"]: row for row in rows}
        traces = [row for row in of_steps(store, "traces")[step] if row["group_id"] in lost]
        assert sorted(row["assignment_id"] for row in traces) == sorted(
            n for row in rows for n in row["assignment_ids"]
        )
        assert {(row["error_class"], row["reward"]) for row in traces} <= {("stale", None)}
    return found


@pytest.mark.parametrize("stale", ["drop", "top_up"])
def test_a_group_that_a_step_would_wait_for_is_stopped_and_replaced(tmp_path, monkeypatch, stale):
    root, sampling = tmp_path / "store", Exchanging(hanging=LONG.__contains__)
    store = run(root, monkeypatch, sampling, stale=stale)
    found = check_taken(store)
    assert found.keys() == LONG == {*sampling.stopped} and not any(row["has_ended"] for row in found.values())
    assert not [row for row in found.values() if row["policy_version"] != 0], "both were begun with the first policy"
    # What replaces them is assigned by the step with which they are recorded, and is taken like any other group.
    assigned = {row["group_id"]: row for row in store.scan("assignments").collect().to_dicts()}
    new = {name: row for name, row in assigned.items() if ".1" in name}
    assert (
        new.keys()
        == {"2.1000-0", "2.1000-1"}
        <= {row["group_id"] for rows in of_steps(store, "intakes") for row in rows}
    )
    examples = [assigned[name]["example_id"] for name in sorted(LONG)]
    assert ([row["example_id"] for row in new.values()] == examples) == (stale == "top_up")
    assert not {row["seed"] for row in new.values()} & {assigned[name]["seed"] for name in LONG}
    measured = {row["name"]: row["value"] for row in of_steps(store, "metrics", stage="metrics")[2]}
    assert measured["accounting/stale"] == sum(len(row["assignment_ids"]) for row in found.values())
    assert measured["stream/stale"] == len(LONG) / (len(LONG) + GROUPS)
    again, steps = walk(ask(root, from_stage="filtering", overrides=[RLOO]))
    assert len(steps) == STEPS
    assert of_steps(store, "stale_groups", again.context.run) == of_steps(store, "stale_groups")


@pytest.mark.engine
@pytest.mark.parametrize("moment", ["1-0", "2-2", "2.1000-1", "3-1", "exchange"])
def test_after_a_crash_what_was_stale_stays_so(tmp_path, monkeypatch, moment):
    root = tmp_path / "store"
    with pytest.raises(Interrupted):
        run(root, monkeypatch, Exchanging(hanging=LONG.__contains__, die_at=moment), stale="drop")
    before = open_store(root)
    recorded = {row["group_id"]: row["policy_key"] for row in rows_of(before, "intakes")}
    stale = {row["group_id"] for row in rows_of(before, "stale_groups")}
    again = Exchanging()
    store = run(root, monkeypatch, again, stale="drop")
    found = check_taken(store)
    taken = {row["group_id"]: row["policy_key"] for rows in of_steps(store, "intakes") for row in rows}
    assert stale <= found.keys() and recorded.items() <= taken.items()
    assert Counter(again.sampled) == Counter(taken.keys() - recorded.keys())
    # Those that were under way are sampled again by a younger policy, and are not too old any more.
    assert found.keys() == stale


def rows_of(store: Store, name: str) -> list[dict[str, Any]]:
    """All rows of a table."""
    return store.scan(name).collect().to_dicts()


@pytest.mark.parametrize("update", ["wait", "keep", "abort"])
def test_a_stream_that_oversamples_leaves_the_slowest_groups(tmp_path, monkeypatch, update):
    sampling = Exchanging(hanging=lambda name: name in LONG)
    store = run(tmp_path / "store", monkeypatch, sampling, update, oversampling=1.5, stale="drop")
    found = check_taken(store)
    # Half as many groups again are assigned, so nothing has to be replaced.
    assert found and not [row for row in rows_of(store, "assignments") if ".1" in row["group_id"]]
    assert not LONG & {row["group_id"] for rows in of_steps(store, "intakes") for row in rows}


def test_a_replay_computes_the_same_rows_bit_by_bit(tmp_path, monkeypatch):
    root = tmp_path / "store"
    store = run(root, monkeypatch, Exchanging(hanging=LONG.__contains__), stale="drop")
    stages = ("filtering", "advantage", "packing")
    recorded = {each.key: each for stage in stages for each in store.ledger.entries(run="base", stage=stage)}
    find, append, again = RunContext.find, RunContext.append, dict[tuple[str, str], pa.Table]()

    def computed(context: RunContext, name: str, rows: pa.Table, **place: Any) -> Any:
        again[place["key"], name] = rows
        return append(context, name, rows, **place)

    # What the run recorded is hidden, so that the replay makes it again out of the recorded rollouts.
    monkeypatch.setattr(RunContext, "find", lambda self, key: None if key in recorded else find(self, key))
    monkeypatch.setattr(RunContext, "append", computed)
    walk(ask(root, from_stage="filtering"))
    expected = {(key, piece.table): piece for key, entry in recorded.items() for piece in entry.outputs}
    assert expected and expected.keys() <= again.keys()
    for name, piece in expected.items():
        assert again[name].equals(store.read([piece]))
