"""A run of kind dpo on recorded rollouts, reference and learner played: pairs, keys, lineage, what is refused."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from configs.errors import ConfigError
from flows.orchestration.states import EmptyBatch
from flows.queries.row_lineage import identify, traverse
from flows.runtime import loop
from flows.runtime.maintenance import remove_planned
from flows.runtime.preferences import recorded_pairs, require_tokenizer, with_reference
from flows.runtime.session import needs, record_run
from flows.services.teachers import TeacherEngines
from storage.errors import RunUnknown
from storage.maintenance.plan import plan_removal
from storage.read.frames import Frames
from tasks.advantage import reference
from tasks.assignment.examples import PREFERENCE_STAGE
from tasks.inference.engine.client import ServedModel
from tasks.rollout import regrade
from tasks.runtime.run_context import RunContext
from tests.fixtures import fixed, rehearsal, replays
from tests.fixtures.builders import stand_in, table
from tests.fixtures.rehearsal import SOURCE, Rehearsal, made, play, rehearse, sampled_with, session_for

DPO = {
    "kind": "dpo",
    "steps": 2,
    "environments": ({"name": "preferences", "taskset": {"id": "preferences"}},),
    "data": {"runs": ("base",)},
    "assignment": {"groups_per_step": 4, "group_size": 2},
    "algorithm": {"type": "preferences", "teacher": {"path": "/weights", "version": "first"}},
    "packing": {"tokens_per_row": 64, "zero_advantages": True, "updates_per_step": 3},
    "training": {"loss": {"type": "dpo"}},
    "filtering": {"filters": ({"type": "errored"},)},
}


@pytest.fixture
def store(root, monkeypatch):
    """A store with a recorded run, and a reference that gives every token the same."""

    def score(served, sequences, most):
        yield from ((place, [-0.5] * len(tokens)) for place, tokens in enumerate(sequences))

    monkeypatch.setattr(reference, "score", score)
    monkeypatch.setattr(TeacherEngines, "serve", lambda self, teacher: ServedModel("http://teacher", ""))
    return rehearse(root, "base")


def learn(root, monkeypatch, name="preferred", **changes):
    """Go through a run on the pairs of the recorded run; return its finished steps."""
    session = session_for(root, name, **DPO | changes)
    pairs, inputs = recorded_pairs(session.context.store, session.config)
    source = replace(SOURCE, pairs=pairs, pair_inputs=inputs)
    with monkeypatch.context() as patch, record_run(session):
        patch.setitem(rehearsal.STAND_INS, "examples", PREFERENCE_STAGE)
        return list(loop.train_steps(Rehearsal(session), source))


def rewards(store, run="base"):
    """Return the rewards of each group by trace."""
    groups = {}
    for row in (row for rows in made(store, "rollout", "traces", run) for row in rows):
        if row["error_class"] is None and row["trainable"] and row["reward"] is not None:
            groups.setdefault(row["group_id"], {})[row["trace_id"]] = row["reward"]
    return {group: earned for group, earned in groups.items() if len(set(earned.values())) > 1}


def test_pairs_are_the_best_and_the_worst_of_each_group_and_their_lineage_is_whole(root, store, monkeypatch):
    finished = learn(root, monkeypatch)
    groups = rewards(store)
    assert len(groups) > 2
    pairs = [json.loads(row["task"]) for row in made(store, "examples", "examples", "preferred")[0]]
    assert len(pairs) == len(groups)
    for pair in pairs:
        (earned,) = (each for each in groups.values() if pair["chosen"] in each)
        assert earned[pair["chosen"]] == max(earned.values()) and earned[pair["rejected"]] == min(earned.values())
    recorded = {row["trace_id"]: row for rows in made(store, "rollout", "messages") for row in rows}
    for step, traces in enumerate(made(store, "preference", "traces", "preferred")):
        assert len(traces) == 8 and {row["environment"] for row in traces} == {"preferences"}
        ids = [row["trace_id"] for row in traces]
        assert len({*ids}) == 8 and {name.partition(".")[0] for name in ids} <= {*recorded}
        samples = made(store, "advantage", "samples", "preferred")[step]
        assert sorted(row["advantage"] for row in samples) == [-1.0] * 4 + [1.0] * 4
        rows = made(store, "packing", "batches", "preferred")[step]
        group_of = {row["sample_id"]: row["group_id"] for row in samples}
        updates = {group_of[name]: row["update"] for row in rows for name in row["sample_ids"]}
        assert {(group_of[name], row["update"]) for row in rows for name in row["sample_ids"]} == {*updates.items()}
    frames = Frames(store)
    inputs = frames.graph.works[finished[0].training.key].inputs
    assert inputs.keys() == {"packing", "advantage", "policy"}
    tree = traverse(frames, identify(frames, "preferred:0:0"), up=True)
    makers = {frames.graph.works[node.key].stage for node in tree.facts if node.kind == "trace"}
    assert makers == {"preference", "rollout"}, "from the batch to the rollouts that another run sampled"


def test_it_goes_on_with_its_pairs_when_the_recorded_run_has_gone_on(root, store, monkeypatch):
    first = learn(root, monkeypatch)
    rehearse(root, "base", steps=3)
    assert [each.training.key for each in learn(root, monkeypatch)] == [each.training.key for each in first]
    config = session_for(root, "other", **DPO).config
    assert len(recorded_pairs(store, config)[0]) > len(made(store, "examples", "examples", "preferred")[0])


def test_a_rollout_in_quarantine_is_in_no_pair_and_the_next_best_is(root, store):
    config = session_for(root, "preferred", **DPO).config
    before = [pair["chosen"] for pair in recorded_pairs(store, config)[0]]
    store.quarantines.record(before[:1], where="made up", reason="the verifier was broken", run="base")
    after = [pair[name] for pair in recorded_pairs(store, config)[0] for name in ("chosen", "rejected")]
    assert len(after) == 2 * len(before) and before[0] not in after


def test_what_work_made_is_read_once_a_step_however_many_pairs_are_of_it(root, store, monkeypatch):
    read, pieces = RunContext.read, []
    with monkeypatch.context() as patch:
        patch.setattr(RunContext, "read", lambda self, piece, *names: pieces.append(piece) or read(self, piece, *names))
        learn(root, patch, steps=1)
    recorded = Counter(piece for piece in pieces if piece.run == "base")
    assert recorded and set(recorded.values()) == {1}


def scored_again(tables, config):
    """Stand in for scoring again, which finds the same."""
    return {"traces": tables["traces"], "regrades": table("regrades", [])}


def test_messages_stay_with_scores_when_both_runs_are_removed(root, store, monkeypatch):
    """Scoring again makes no messages: they are of work that the scores' own row names, and no other."""
    installed = {"name": fixed.ENVIRONMENT, "taskset": {"id": "sample_reverse_text"}, "harness": {"id": "null"}}
    rehearse(root, "played", environments=(installed,))
    with monkeypatch.context() as patch:
        again = stand_in(regrade.STAGE, scored_again, writes=("traces", "regrades"))
        patch.setitem(rehearsal.STAND_INS, "regrade", again)
        scored = replays.ask(root, run="played", regrade=True)
        replays.walk(scored)
    changes = {"data": {"runs": (scored.name,)}}
    learn(root, monkeypatch, steps=1, **changes)
    remove_planned(store, plan_removal(store, ["preferred"], force=["base", "played", scored.name]))
    assert len(learn(root, monkeypatch, **changes)) == 2, "the second step reads rollouts of removed runs"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"overrides": ("rollout.max_tokens=9",)}, "rollout.max_tokens: belongs to stage rollout"),
        ({"from_stage": "rollout"}, "replayed from filtering on"),
        ({"regrade": True}, "without --regrade"),
    ],
)
def test_a_replay_samples_and_scores_nothing_anew(root, store, monkeypatch, asked, words):
    learn(root, monkeypatch, steps=1)
    with pytest.raises(ConfigError, match=words):
        replays.ask(root, run="preferred", **asked)


def test_what_cannot_be_learnt_from_is_refused(root, store, monkeypatch):
    config = session_for(root, "preferred", **DPO).config
    misspelt = config.model_copy(update={"data": config.data.model_copy(update={"runs": ("bass",)})})
    with pytest.raises(RunUnknown, match="bass") as refused:
        recorded_pairs(store, misspelt)
    assert "the nearest runs are: base" in str(refused.value)
    require_tokenizer(store, config)
    model = config.model.model_copy(update={"tokenizer_digest": "another"})
    with pytest.raises(ConfigError, match="another tokenizer"):
        require_tokenizer(store, config.model_copy(update={"model": model}))
    play(monkeypatch, rollout=sampled_with(lambda _, row: {"reward": 1.0}))
    with pytest.raises(EmptyBatch):
        rehearse(root, "equal", seed=8)
    equal = config.model_copy(update={"data": config.data.model_copy(update={"runs": ("equal",)})})
    with pytest.raises(ConfigError, match="no group of equal has two different rewards"):
        recorded_pairs(store, equal)


def test_the_weights_that_it_starts_from_are_the_reference_and_no_policy_samples(root, store, monkeypatch):
    bare = session_for(root, "preferred", **DPO | {"algorithm": {"type": "preferences"}, "model": {"path": "/w"}})
    assert with_reference(bare.config).algorithm.teacher.path == "/w"
    config = session_for(root, "preferred", **DPO).config
    assert with_reference(config) == config
    work = [each for step in learn(root, monkeypatch) for each in step.refs]
    assert needs(work, config) == ["learner"]
    assert needs([replace(work[0], stage="reference")], config) == ["teachers"]
