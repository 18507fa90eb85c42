"""Weights that are exchanged under the rollouts of a stream: ages, tokens of several policies, crashes, replays."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from flows.queries.row_lineage import find_rows, traverse
from storage.read.frames import Frames
from storage.store import open_store
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy
from tests.fixtures import fixed
from tests.fixtures.builders import table
from tests.fixtures.histories import policy_row
from tests.fixtures.rehearsal import SMALL, STAND_INS
from tests.fixtures.replays import RLOO, replay
from tests.fixtures.streams import Interrupted, PlayedEngine, of_steps, recorded_groups, stream

STEPS, GROUPS, BOUND = 6, 3, 2
LAST = STEPS - 1 - BOUND
"""The version of the last policy that the stream is given."""


@dataclass
class Running:
    """A group that is being sampled: its assignments, and the policies that have sampled it so far."""

    members: list[dict[str, Any]]
    policies: list[Policy]

    @property
    def has_ended(self):
        is_slow = self.members[0]["group_id"].endswith("-0")
        return not is_slow or len(self.policies) > 1 or self.policies[-1].version == LAST


@dataclass
class Exchanging(PlayedEngine):
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

    def exchange(self, policy, *, recompute):
        self._die("exchange")
        self.losses -= 1
        if self.losses >= 0:
            # As the sampler makes it of what its client raises.
            raise ServiceLost(self.served.url, "killed")
        self.refusals -= 1
        if self.refusals >= 0:
            return None
        self.exchanged.append(policy.version)
        self.kept.append(not recompute)
        return self.served

    def _die(self, moment):
        if moment == self.die_at:
            raise Interrupted(moment)

    def run(self, left, policy, step, on_group, plan):
        running = {}
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


def rows(group, step):
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


@pytest.fixture
def run(root, monkeypatch):
    """Go through a run whose weights are exchanged under its rollouts, from where it stands, or up to its death."""

    def go(sampling, update="keep", oversampling=1.0, **rollouts):
        settings = {"max_off_policy_steps": BOUND, "weight_update": update, **rollouts}
        assigned = SMALL["assignment"] | ({"oversampling": oversampling} if oversampling > 1 else {})
        return stream(root, monkeypatch, sampling, steps=STEPS, rollout=settings, assignment=assigned)

    return go


def taken_rows(store):
    """The rows of the groups that the steps took: each once, none older than the bound."""
    rows = [row for step in of_steps(store, "intakes") for row in step]
    assert len(rows) == len({row["group_id"] for row in rows}) == STEPS * GROUPS
    assert max(row["age"] for row in rows) <= BOUND
    return rows


def check_repeated(sampling):
    """Check that some groups were begun again, and that each ended once."""
    assert sorted(sampling.sampled) == sorted(set(sampling.begun)) and len(sampling.begun) > len(sampling.sampled)


@pytest.mark.parametrize("refusals", [0, 3])
def test_rollouts_under_way_go_on_and_no_token_is_older_than_the_bound(run, refusals):
    sampling = Exchanging(refusals=refusals)
    store = run(sampling, recompute_states=False)
    assert sampling.exchanged and all(sampling.kept)
    groups = taken_rows(store)
    assert sorted(row["group_id"] for row in groups) == sorted(sampling.sampled) == sorted(sampling.begun)
    runs = of_steps(store, "token_policies")
    assert sum(map(len, runs)), "no rollout has tokens of several policies"
    for step, (traces, of_step) in enumerate(zip(of_steps(store, "traces"), runs, strict=True)):
        versions = {}
        for each in of_step:
            versions.setdefault(each["trace_id"], set()).add(each["policy_version"])
        assert all(0 <= row["staleness"] == step - row["policy_version"] <= BOUND for row in traces)
        own = {row["trace_id"]: row for row in traces}
        for name, several in versions.items():
            assert len(several) > 1 and own[name]["policy_version"] == min(several)
            assert max(several) <= step


def with_policies(stage, first):
    """A stand-in for a stage that makes a policy, which also leaves the row of that; `first` is step 0's version."""

    def make(attempt, config):
        (attempt.directory / "model.safetensors").write_text(attempt.key)
        row = policy_row(attempt.key, attempt.step + first, None, False)
        return {**stage.function(attempt, config), "policies": row}

    return replace(stage, writes=(*stage.writes, "policies"), function=make)


def test_lineage_leads_from_a_gradient_to_every_policy_that_sampled_a_part(run, monkeypatch):
    for name, first in (("training", 1), ("policy_import", 0)):
        monkeypatch.setitem(STAND_INS, name, with_policies(STAND_INS[name], first))
    store = run(Exchanging())
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


def test_what_was_under_way_when_the_engine_was_lost_is_sampled_again(run):
    sampling = Exchanging(losses=2)
    taken_rows(run(sampling))
    check_repeated(sampling)
    assert sampling.losses < 0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("moment", "update"),
    [("exchange", "keep"), ("exchanged", "keep"), ("1-0", "keep"), ("3-0", "keep"), ("1-1", "abort"), ("3-0", "abort")],
)
def test_after_a_crash_nothing_is_lost_and_nothing_twice(run, root, moment, update):
    with pytest.raises(Interrupted):
        run(Exchanging(die_at=moment), update)
    recorded = recorded_groups(open_store(root))
    again = Exchanging()
    taken = {row["group_id"]: row["policy_key"] for row in taken_rows(run(again, update))}
    assert taken.items() >= recorded.items(), "a finished group is not the one that was trained on"
    assert Counter(again.sampled) == Counter(taken.keys() - recorded.keys())


def test_dropped_groups_are_sampled_again_with_one_policy_each(run):
    sampling = Exchanging()
    store = run(sampling, "abort")
    check_repeated(sampling)
    assert sampling.exchanged == [] and not any(of_steps(store, "token_policies"))
    taken_rows(store)


LONG = {"0-0", "1-1"}
"""Groups that last longer than any step waits."""


def check_taken(store):
    """Check that each step has its groups, none too old and none twice; return the groups that were stale, by id."""
    assert [len(rows) for rows in of_steps(store, "intakes")] == [GROUPS] * STEPS
    groups = {row["group_id"] for row in taken_rows(store)}
    stale = of_steps(store, "stale_groups")
    found = {row["group_id"]: row for rows in stale for row in rows}
    assert len(found) == sum(map(len, stale)) and not groups & found.keys()
    for step, rows in enumerate(stale):
        versions = [row["policy_version"] for row in rows if row["policy_version"] is not None]
        assert all(step - version >= BOUND for version in versions)
        lost = {row["group_id"] for row in rows}
        traces = [row for row in of_steps(store, "traces")[step] if row["group_id"] in lost]
        assigned = [name for row in rows for name in row["assignment_ids"]]
        assert sorted(row["assignment_id"] for row in traces) == sorted(assigned)
        assert {(row["error_class"], row["reward"]) for row in traces} <= {("stale", None)}
    return found


@pytest.mark.parametrize("stale", ["drop", "top_up"])
def test_a_group_that_a_step_would_wait_for_is_stopped_and_replaced(run, root, stale):
    sampling = Exchanging(hanging=LONG.__contains__)
    store = run(sampling, stale=stale)
    found = check_taken(store)
    assert found.keys() == LONG == {*sampling.stopped} and not any(row["has_ended"] for row in found.values())
    assert not [row for row in found.values() if row["policy_version"] != 0], "both were begun with the first policy"
    # What replaces them is assigned by the step with which they are recorded, and is taken like any other group.
    assigned = {row["group_id"]: row for row in store.scan("assignments").collect().to_dicts()}
    new = {name: row for name, row in assigned.items() if ".1" in name}
    assert new.keys() == {"2.1000-0", "2.1000-1"} <= {row["group_id"] for row in taken_rows(store)}
    examples = [assigned[name]["example_id"] for name in sorted(LONG)]
    assert ([row["example_id"] for row in new.values()] == examples) == (stale == "top_up")
    assert not {row["seed"] for row in new.values()} & {assigned[name]["seed"] for name in LONG}
    measured = {row["name"]: row["value"] for row in of_steps(store, "metrics", stage="metrics")[2]}
    assert measured["accounting/stale"] == sum(len(row["assignment_ids"]) for row in found.values())
    assert measured["stream/stale"] == len(LONG) / (len(LONG) + GROUPS)
    again, steps = replay(root, from_stage="filtering", overrides=[RLOO])
    assert len(steps) == STEPS
    assert of_steps(store, "stale_groups", again.context.run) == of_steps(store, "stale_groups")


@pytest.mark.engine
@pytest.mark.parametrize("moment", ["1-0", "2-2", "2.1000-1", "3-1", "exchange"])
def test_after_a_crash_what_was_stale_stays_so(run, root, moment):
    with pytest.raises(Interrupted):
        run(Exchanging(hanging=LONG.__contains__, die_at=moment), stale="drop")
    before = open_store(root)
    recorded = recorded_groups(before)
    stale = {row["group_id"] for row in before.scan("stale_groups").collect().to_dicts()}
    again = Exchanging()
    store = run(again, stale="drop")
    found = check_taken(store)
    taken = {row["group_id"]: row["policy_key"] for row in taken_rows(store)}
    assert stale <= found.keys() and recorded.items() <= taken.items()
    assert Counter(again.sampled) == Counter(taken.keys() - recorded.keys())
    # Those that were under way are sampled again by a younger policy, and are not too old any more.
    assert found.keys() == stale


@pytest.mark.parametrize("update", ["wait", "keep", "abort"])
def test_a_stream_that_oversamples_leaves_the_slowest_groups(run, update):
    store = run(Exchanging(hanging=LONG.__contains__), update, oversampling=1.5, stale="drop")
    found = check_taken(store)
    # Half as many groups again are assigned, so nothing has to be replaced.
    assert found and not [name for name in store.scan("assignments").collect()["group_id"] if ".1" in name]
    assert not LONG & {row["group_id"] for row in taken_rows(store)}


def test_a_replay_computes_the_same_rows_bit_by_bit(run, root, monkeypatch):
    store = run(Exchanging(hanging=LONG.__contains__), stale="drop")
    stages = ("filtering", "advantage", "packing")
    recorded = {each.key: each for stage in stages for each in store.ledger.entries(run="base", stage=stage)}
    find, append, again = RunContext.find, RunContext.append, {}

    def computed(context, name, rows, **place):
        again[place["key"], name] = rows
        return append(context, name, rows, **place)

    # What the run recorded is hidden, so that the replay makes it again out of the recorded rollouts.
    monkeypatch.setattr(RunContext, "find", lambda self, key: None if key in recorded else find(self, key))
    monkeypatch.setattr(RunContext, "append", computed)
    replay(root, from_stage="filtering")
    expected = {(key, piece.table): piece for key, entry in recorded.items() for piece in entry.outputs}
    assert expected and expected.keys() <= again.keys()
    for name, piece in expected.items():
        assert again[name].equals(store.read([piece]))
