"""A run whose episodes are debates: three rollouts each, of which the judge's is never trained, and only the learner's
where the config says so."""

import json
from collections import Counter
from contextlib import nullcontext

import pyarrow as pa
import pytest

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.replays.request import refuse_unread
from tasks.arrays.seats import LearnerSeatMissing
from tests.fixtures import fixed, rehearsal
from tests.fixtures.rehearsal import rehearse
from tests.fixtures.replays import ask, walk

pytestmark = pytest.mark.engine

SEATS = ("for", "against", "judge")
ENVIRONMENT = {"name": fixed.ENVIRONMENT, "taskset": {"id": fixed.ENVIRONMENT}}


def debated(tables, config, *, step, policy):
    """Stand in for sampling: every rollout is an episode of two debaters, who share out one point, and a judge."""
    made = rehearsal.sampled(tables, config, step=step, policy=policy)
    traces, messages = [], []
    for number, row in enumerate(made["traces"].to_pylist()):
        for seat, reward in zip(SEATS, (row["reward"], 1 - row["reward"], 0.0), strict=True):
            name = f"{row['trace_id']}-{seat}"
            own = {"trace_id": name, "episode_id": row["trace_id"], "agent": seat, "reward": reward}
            traces.append(row | own | {"info": json.dumps({"learner_seat": SEATS[number % 2]})})
            messages += [
                each | {"trace_id": name}
                for each in made["messages"].to_pylist()
                if each["trace_id"] == row["trace_id"]
            ]
    found = {"traces": traces, "messages": messages}
    return {name: pa.Table.from_pylist(rows, made[name].schema) for name, rows in found.items()}


@pytest.fixture(autouse=True)
def debates(monkeypatch):
    rehearsal.play(monkeypatch, rollout=debated)


def table(store, name, columns, runs=()):
    """Return the rows of a table that a store's runs made, or some of them, those that several runs use once."""
    entries = [each for each in store.ledger.entries() if each.slices(name) and (not runs or each.run in runs)]
    by_key = {each.key: each.slices(name) for each in entries}
    return [row for slices in by_key.values() for row in store.read(slices, columns).to_pylist()]


def run(root, name, **environment):
    return rehearse(root, name, environments=(ENVIRONMENT | environment,), algorithm={"type": "rae"})


def reasons(store):
    agents = {row["trace_id"]: row["agent"] for row in table(store, "traces", ["trace_id", "agent"])}
    return Counter((agents[row["trace_id"]], row["reason"]) for row in table(store, "verdicts", ["trace_id", "reason"]))


def packed(store):
    return Counter(sample for row in table(store, "batches", ["sample_ids"]) for sample in row["sample_ids"] if sample)


def test_debaters_are_trained_and_the_judge_is_not(root):
    store = run(root, "debate")
    assert reasons(store) == {("for", None): 24, ("against", None): 24, ("judge", "judge"): 24}
    assert set(packed(store).values()) == {1} and len(packed(store)) == 48
    assert not any("judge" in sample for sample in packed(store))
    states = table(store, "estimator_states", ["agent"])
    assert {row["agent"] for row in states} == {"for", "against"}, "no baseline ever saw a judge"


def test_only_the_learner_of_each_episode_is_trained(root):
    store = run(root, "learner", learner_seat=True)
    found = reasons(store)
    debaters = {(seat, reason): 12 for seat in ("for", "against") for reason in (None, "other_seat")}
    assert found == debaters | {("judge", "judge"): 24}
    assert len(packed(store)) == 24


def test_examples_are_as_hard_as_they_are_for_the_learner(tmp_path):
    """What one debater earns the other loses: over both, every example would be as hard as any."""
    pools = {"assignment": rehearsal.SMALL["assignment"] | {"sampler": {"type": "difficulty_pools"}}}
    both, learner = (
        rehearse(tmp_path / name, name, environments=(ENVIRONMENT | own,), algorithm={"type": "rae"}, **pools)
        for name, own in (("both", {}), ("learner", {"learner_seat": True}))
    )
    assert {row["reward"] for row in table(both, "difficulties", ["reward"])} == {0.5}
    assert {row["reward"] for row in table(learner, "difficulties", ["reward"])} - {0.5}


def test_a_run_whose_rollouts_do_not_name_the_learner_stops(root, monkeypatch):
    rehearsal.play(monkeypatch, rollout=rehearsal.sampled)
    with pytest.raises(LearnerSeatMissing, match="has no 'learner_seat'"):
        run(root, "nameless", learner_seat=True)


def test_recorded_episodes_are_replayed_with_other_seats_trained(root):
    store = run(root, "base")
    config = ask(root, overrides=["environments.0.learner_seat=true"])
    assert config.replay.from_stage == "filtering"
    walk(config)
    (again,) = {entry.run for entry in store.ledger.entries(stage="packing")} - {"base"}
    rows = table(store, "batches", ["sample_ids"], [again])
    assert len({sample for row in rows for sample in row["sample_ids"]}) == 24, "of 48 in the run itself"


@pytest.mark.parametrize(
    ("begin", "setting", "said"),
    [
        ("filtering", "drop_judge=false", ""),
        ("advantage", "drop_judge=false", "drop_judge: belongs to stage filtering.* use --from filtering"),
        ("rollout", "seats.for.temperature=0.5", ""),
        ("rollout", "top_k=5", ""),
        ("rollout", "hang_seconds=600", ""),
        ("rollout", "pool.num_workers=2", ""),
        ("filtering", "seats.for.temperature=0.5", "seats.for.temperature: the examples are the recorded ones"),
    ],
)
def test_a_replay_reads_settings_of_seats_where_they_are_used(begin, setting, said):
    config = RunConfig.model_validate({"kind": "replay", "replay": {"run": "base", "from_stage": begin}})
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        refuse_unread(config, [f"environments.0.{setting}"], has_data=False)
