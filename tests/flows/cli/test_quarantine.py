"""Quarantine: which rollouts a condition finds, what they went into, and how a person is told."""

import json
import re
from datetime import UTC, datetime

import pytest

from configs.run import RunConfig
from flows.cli.unfit_rollouts import COUNTS, NoSuchRollouts, search, uses
from storage.errors import RunUnknown
from storage.maintenance.sweep import Retention, expire
from storage.refs import Entry
from storage.store import open_store
from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.filtering.stage import STAGE as FILTERING
from tasks.packing.stage import STAGE as PACKING
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import perform
from tests.fixtures.builders import exchange, failed, stage_of, table, trace

CONFIG = RunConfig.model_validate({"seed": 7, "model": {"vocab_size": 512}, "training": {"dtype": "float32"}})
REWARDS = {"a": 1.0, "b": 0.0, "c": 0.5}


class Run:
    """A run in a real store whose rollouts are given and whose policies have no weights."""

    def __init__(self, store, name):
        self.context = RunContext(store, name, CONFIG, {})
        store.runs.record(run=name, event="started", kind="train", config={})

    def sample(self, step, rewards=REWARDS, stage="rollout", **columns):
        """Write rollouts, one for each reward and a failed one, as if they had been sampled at this step."""
        rows = [rollout(f"{step}{name}", step, reward=reward, **columns) for name, reward in rewards.items()]
        return self.planted(step, stage, [*rows, failed(f"{step}x")])

    def planted(self, step, name, rows):
        messages = [row for one in rows for row in exchange(one["trace_id"])]
        made = {"traces": table("traces", rows), "messages": table("messages", messages)}
        return perform(stage_of(name, lambda tables, config: made, tuple(made)), self.context, step)

    def pack(self, step, *traces, quarantined=None):
        """Go from rollouts to packed batches."""
        extra = {"quarantine": ",".join(quarantined)} if quarantined else {}
        verdicts = perform(FILTERING, self.context, step, traces, parameters=quarantined, extra_inputs=extra)
        credits = perform(ADVANTAGE, self.context, step, (*traces, verdicts))
        return perform(PACKING, self.context, step, (credits, *traces))

    def train(self, step, packed, policy):
        """Write down that a policy was trained on packed batches; return its key."""
        now = datetime.now(UTC)
        inputs = {"packing": packed.key, "policy": policy}
        key = f"trained-{self.context.run}-{step}"
        self.context.store.ledger.commit(
            Entry(self.context.run, step, "training", 1, key, "", f"{key}-attempt", {}, inputs, (), now, now)
        )
        return key


def rollout(name, step, **columns):
    """Return a row of traces, in the group of its step."""
    return trace(name, group_id=f"g{step}", **columns)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


@pytest.fixture
def run(store):
    return Run(store, "demo")


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("reward >= 0.5 and step = 1", ["1a", "1c"]),
        ("error_class = 'timeout' or \"Reward\" = 1", ["0a", "0x", "1a", "1x"]),
    ],
)
def test_a_condition_on_the_columns_of_traces(store, run, where, ids):
    run.sample(0)
    run.sample(1)
    assert search(store, where) == (ids, 8)


def test_only_the_rollouts_that_a_run_uses(store, run):
    shared = run.sample(0)
    run.sample(1)
    other = Run(store, "other")
    entry = store.ledger.find(shared.key)
    assert entry is not None
    other.context.adopt(entry, 0)
    assert search(store, "reward = 1", "other")[0] == ["0a"]
    assert search(store, "reward = 1")[0] == ["0a", "1a"]
    with pytest.raises(RunUnknown, match="nobody"):
        search(store, "reward = 1", "nobody")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("rewrd > 2", 'column "rewrd" not found.*\n.*nearest columns are reward, rewards'),
        ("trace_id in (select * from read_csv('.tmp/spilled.csv'))", "disabled by configuration"),
        ("reward > 7", "holds for none of 4"),
    ],
)
def test_what_is_no_condition_is_explained_with_the_columns(store, run, where, said):
    run.sample(0)
    with pytest.raises(NoSuchRollouts, match=said) as caught:
        search(store, where)
    assert "error_class" in str(caught.value) and "Nothing was recorded" in str(caught.value)


def test_every_batch_step_and_policy_that_used_them(store, run):
    policy, keys = "imported", []
    for step in range(3):
        packed = run.pack(step, run.sample(step))
        policy = run.train(step, packed, policy)
        keys.append(packed.key)
    other = Run(store, "other")  # shares the batch of step 1, and trains nothing on it
    entry = store.ledger.find(keys[1])
    assert entry is not None
    other.context.adopt(entry, 1)
    found = uses(store, ["0a", "1a", "1b", "1x"])
    assert [tuple(use.values()) for use in found] == [
        ("demo", 0, keys[0], 1, 1, 5, "trained-demo-0", 1, 2),
        ("demo", 1, keys[1], 1, 2, 10, "trained-demo-1", 2, 1),
        ("other", 1, keys[1], 1, 2, 10, None, None, 0),
    ]
    assert uses(store, ["1x"]) == [], "a failed rollout was never packed"


def test_a_batch_whose_rows_are_kept_no_longer_may_have_held_them(store, run, call):
    run.train(0, run.pack(0, run.sample(0)), "imported")
    expire(store, Retention("batches", 0))
    (use,) = uses(store, ["0a"])
    assert (*(use[name] for name in COUNTS), use["version"]) == (None, None, None, 1)
    told = call("quarantine", "--where", "reward = 1", "--reason", "why")[1]
    assert re.search(r"demo\t0\t\w{8}\t\t\t\ttrained-\t1\t0", told), told


def test_what_was_graded_again_and_packed_is_found(store, run):
    sampled = run.sample(0)
    rows = [rollout(f"0{name}", 0, reward=1 - reward) for name, reward in REWARDS.items()]
    again = run.planted(0, "regrade", [*rows, failed("0x")])
    packed = run.pack(0, again, sampled)
    assert [use["batch"] for use in uses(store, ["0a"])] == [packed.key]


def test_the_command_records_and_tells(store, run, call):
    run.train(0, run.pack(0, run.sample(0)), "imported")
    first = ["quarantine", "--where", "reward = 1"]
    told = call(*first, "--dry-run")[1]
    assert "num rollouts: 1\nnum looked at: 4\n" in told and "nothing was recorded (--dry-run)\n" in told
    assert store.quarantines.all() == []
    status, told = call(*first, "--reason", "verifier [broken]", "--run", "demo")
    (noted,) = open_store(str(store.root.directory)).quarantines.all()
    assert (status, noted.trace_ids, noted.reason, noted.run) == (0, ("0a",), "verifier [broken]", "demo")
    assert f"quarantine: {noted.quarantine}\n" in told and "reason: verifier [broken]\n" in told
    assert re.search(r"demo\t0\t\w{8}\t1\t1\t5\ttrained-\t1\t0", told), told
    assert "stagecoach replay demo --from filtering" in told
    _, listed = call("quarantine", "--list")
    assert all(text in listed for text in (noted.quarantine, "verifier [broken]", noted.at.isoformat()))
    answer = json.loads(call("quarantine", "--where", "reward = 0", "--reason", "why", "--json")[1])
    assert (answer["trace_ids"], answer["num_looked_at"], len(answer["uses"])) == (["0b"], 4, 1)
    entries = json.loads(call("quarantine", "--list", "--json")[1])["quarantines"]
    assert answer["quarantine"] in [entry["quarantine"] for entry in entries]
    assert [entry["trace_ids"] for entry in entries if entry["at"] == noted.at.isoformat()] == [["0a"]]
    for arguments in ([], ["--where", "true"], ["--reason", "why"], ["--where", " ", "--reason", "w"]):
        status, refusal = call("quarantine", *arguments)
        assert status == 2 and "say which rollouts" in refusal


def test_the_command_proposes_to_replay_the_run_that_was_asked_about(store, run, tmp_path, monkeypatch, call):
    run.pack(0, run.sample(0))
    other = Run(store, "regraded")  # comes later in the alphabet and uses the same batch
    for each in store.ledger.entries(run="demo"):
        other.context.adopt(each, 0)
    mark = ["quarantine", "--where", "reward = 1", "--reason", "why"]
    assert "stagecoach replay regraded --from filtering" in call(*mark, "--run", "regraded")[1]
    monkeypatch.chdir(tmp_path)
    assert "stagecoach replay demo --from filtering --store ./store\n" in call(*mark, "--store", "./store")[1]
