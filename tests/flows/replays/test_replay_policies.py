"""Replays that train: which policies they start from, whose work is whose, and how far they are from home."""

import json

import pytest

from configs.errors import ConfigError
from configs.replay import ORDER
from flows.replays import config as replay_config
from storage.policies.store import Policies
from storage.store import open_store
from tests.fixtures import fixed
from tests.fixtures.builders import message, table
from tests.fixtures.rehearsal import rehearse
from tests.fixtures.replays import RLOO, ask, pieces, quarantine, trained, walk

pytestmark = pytest.mark.engine


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Where a store is made, which has the weights of every policy."""
    monkeypatch.setattr(Policies, "directory", lambda self, key, verify=False: tmp_path / "a")
    monkeypatch.setattr(replay_config, "config_versions", lambda config: {})
    return tmp_path / "store"


@pytest.fixture
def models(tmp_path):
    """Two directories of weights."""
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": 512, "name": name}))
        found.append(str(tmp_path / name))
    return found


def test_other_weights_are_another_replay_whatever_they_are_called(root, models):
    rehearse(root, "base", steps=2, model={"vocab_size": 512, "path": models[0]})
    path = [f"model.path={each}" for each in models]
    whole = {"until": "training", "from_stage": "training"}
    same, first, second = (ask(root, overrides=each, **whole) for each in ([], path[:1], path[1:]))
    assert same.replay.weights == "" and first.replay.weights != second.replay.weights
    assert len({same.name, first.name, second.name}) == 3
    walk(first.model_copy(update={"name": "mine"}))
    with pytest.raises(ConfigError, match=r"replay\.weights"):
        ask(root, until="training", name="mine", overrides=path[1:])


def test_a_step_emptied_by_a_quarantine_stays_empty_in_replays_of_the_replay(root):
    store = rehearse(root, "base", steps=3)
    names = quarantine(store, step=1, count=12)
    store, steps = trained(root, policies="recorded", overrides=["training.learning_rate=0.5"], name="clean")
    assert steps[1]["update"] is None
    kept = {"from_stage": "training", "quarantine": False}
    for asked in ({"from_stage": "training"}, kept, {"from_stage": "filtering"}):
        store, steps = trained(root, run="clean", name=f"again-{len(asked)}-{asked['from_stage']}", **asked)
        assert [step["update"] is None for step in steps] == [False, True, False], asked
        packed = store.ledger.entries(run=f"again-{len(asked)}-{asked['from_stage']}", stage="packing")
        tables = [store.read(each.slices("batches"), ["sample_ids"]) for each in packed]
        rows = [row for each in tables for row in each["sample_ids"].to_pylist()]
        assert rows and not {sample.rpartition("/")[0] for row in rows for sample in row} & set(names)
    entries = store.ledger.entries(run="clean", stage="training")
    versions = [store.read(entry.slices("updates"))["version"][0].as_py() for entry in entries]
    assert [entry.step for entry in entries] == [0, 2] and versions == [1, 3]


def test_rollouts_of_a_replay_that_are_found_again_are_left_out_when_unfit(root):
    rehearse(root, "base", steps=1)
    hot = {"from_stage": "rollout", "overrides": ["rollout.temperature=0.5"]}
    store, _ = trained(root, name="hot", **hot)
    (entry,) = (e for e in store.ledger.entries(run="hot", stage="rollout") if not e.part)
    names = store.read(entry.slices("traces"), ["trace_id"])["trace_id"].to_pylist()[:2]
    store.quarantines.record(names, where="made up", reason="broken", run="hot")
    hot["overrides"] = [*hot["overrides"], RLOO]
    store, _ = trained(root, name="hotter", **hot)
    (verdicts,) = store.ledger.entries(run="hotter", stage="filtering")
    rows = store.read(verdicts.slices("verdicts")).to_pylist()
    assert {row["trace_id"] for row in rows if row["reason"] == "quarantined"} == set(names)


def test_a_quarantine_elsewhere_or_heeded_before_stops_nothing(root):
    quarantine(rehearse(root, "base", steps=2), step=0, count=1)
    assert ask(root, from_stage="packing", steps="1:").replay.from_stage == "packing"
    trained(root, name="clean")
    assert ask(root, run="clean", from_stage="packing").replay.quarantines
    with pytest.raises(ConfigError, match="--no-quarantine: 'clean' began without"):
        ask(root, name="clean", quarantine=False)


@pytest.mark.parametrize("lag", [0, 1])
def test_unchanged_settings_find_everything_from_every_stage(root, lag):
    rehearse(root, "base", steps=3, rollout={"max_off_policy_steps": lag})
    for stage in (stage for stage in ORDER if stage != "judging"):  # the run has no judges
        config = ask(root, until="training", from_stage=stage)
        assert not [piece for piece in pieces(config) if piece.computed], stage
        _, steps = walk(config)
        assert all(step["same_weights"] for step in steps)


def test_other_examples_are_listed_again_and_assigned(root):
    rehearse(root, "base", steps=1)
    config = ask(root, from_stage="assignment", until="assignment", overrides=["environments.0.holdout_fraction=0.5"])
    assert [piece.stage for piece in pieces(config) if piece.computed] == ["examples", "assignment"]


def test_weights_are_not_asked_for_where_nothing_is_trained(root, models):
    rehearse(root, "base", steps=1)
    with pytest.raises(ConfigError, match=r"model\.path: no weights are needed"):
        ask(root, from_stage="packing", until="packing", overrides=[f"model.path={models[1]}"])


def longer(assignments, policy, step):
    """Rollouts of two turns, which part after the first, by an agent with an opponent that is not trained."""
    made = GROUP(assignments, policy, step)
    traces, messages = made["traces"].to_pylist(), made["messages"].to_pylist()
    for each in list(traces):
        name = each["trace_id"]
        messages += [
            message(name, 2, parent=1, tokens=[7, 8]),
            message(name, 3, parent=2, tokens=[9, 10], sampled=True),
        ]
        messages += [message(name, 4, parent=0, tokens=[11], sampled=True)]
        traces.append(
            each | {"trace_id": f"{name}-foe", "agent": "opponent", "trainable": False, "reward": -each["reward"]}
        )
        messages += [
            message(f"{name}-foe", 0, tokens=[5]),
            message(f"{name}-foe", 1, parent=0, tokens=[6], sampled=True),
        ]
    return {"traces": table("traces", traces), "messages": table("messages", messages)}


GROUP = fixed.group


def test_turns_branches_and_agents_are_replayed_as_a_run_would_train_them(root, monkeypatch):
    monkeypatch.setattr(fixed, "group", longer)
    rehearse(root, "base", steps=2)
    store = rehearse(root, "run", steps=2, algorithm={"type": "rloo"})
    steps = trained(root, overrides=[RLOO], policies="own", name="replay")[1]
    stages = ("advantage", "packing", "training")
    theirs = {e.stage: e.key for e in store.ledger.entries(run="run") if e.step == 0 and e.stage in stages}
    store = open_store(root)
    mine = {e.stage: e.key for e in store.ledger.entries(run="replay") if e.step == 0 and e.stage in theirs}
    assert mine == theirs and len(mine) == 3, "a replay with a setting is the same work as the run with that setting"
    (credits,) = (e for e in store.ledger.entries(run="replay", stage="advantage") if e.step == 0)
    rows = store.read(credits.slices("samples")).to_pylist()
    assert {row["branch"] for row in rows} == {0, 1} and not [row for row in rows if row["trace_id"].endswith("-foe")]
    assert [step["num_traces"] for step in steps] == [24, 24]
    assert isinstance(rows[0]["path"], list) and {tuple(row["path"]) for row in rows} == {(0, 1, 2, 3), (0, 4)}
