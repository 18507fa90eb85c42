"""Whole runs and replays with a reference, the teacher played: what is scored, shared, found again and asked for."""

import numpy as np
import pytest

from configs.errors import ConfigError
from flows.cli.run_report import describe
from flows.queries.step_history import step_history
from flows.runtime.loop import evaluation_contexts, plan_work
from flows.runtime.session import needs
from flows.services.teachers import TeacherEngines
from tasks.advantage import reference
from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.model_info import tokenizer_digest
from tasks.rollout.stage import STAGE
from tests.fixtures.builders import model
from tests.fixtures.rehearsal import SMALL, made, rehearse, session_for
from tests.fixtures.replays import ask, missing, walk

SCORE = -0.5


def play(patch):
    """Let a teacher be played that gives every token the same; return how many sequences it was asked for."""
    counts = []

    def score(served, sequences, most):
        counts.append(len(sequences))
        yield from ((place, [SCORE] * len(tokens)) for place, tokens in enumerate(sequences))

    def serve(self, teacher):
        return ServedModel("http://teacher", "", salt=teacher.version)

    patch.setattr(reference, "score", score)
    patch.setattr(TeacherEngines, "serve", serve)
    return counts


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    return play(monkeypatch)


def opd(root, name="teacher"):
    """Return settings of a run that is drawn to the teacher of a name below `root`."""
    teacher = model(root / name, name.encode())
    known = {"vocab_size": 512, "tokenizer_digest": tokenizer_digest(teacher)}
    return {"algorithm": {"type": "opd", "teacher": {"path": str(teacher), "version": name}}, "model": known}


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A directory with a recorded run of two steps, drawn to a teacher, in `store`, and the `teacher`."""
    place = tmp_path_factory.mktemp("taught")
    with pytest.MonkeyPatch.context() as patch:
        play(patch)
        rehearse(place / "store", "base", **opd(place))
    return place


def rows(store, run, stage, table):
    return [row for rows in made(store, stage, table, run) for row in rows]


def test_a_run_scores_before_it_credits_and_finds_both_again(tmp_path, root, asked):
    store = rehearse(root, "base", **opd(tmp_path))
    assert len(asked) == 2, "one call for each step"
    messages, references = rows(store, "base", "rollout", "messages"), rows(store, "base", "reference", "references")
    sampled = {(row["trace_id"], row["message"]) for row in messages if any(row["mask"])}
    kept = {row["trace_id"] for row in rows(store, "base", "filtering", "verdicts") if row["keep"]}
    found = {(row["trace_id"], row["message"]) for row in references}
    assert found == {each for each in sampled if each[0] in kept} and found
    for row in rows(store, "base", "advantage", "samples"):
        assert sum(row["ref_kl_weights"]) > 0 and not any(row["rl_weights"]) and row["advantage"] is None
        assert np.array(row["advantages"])[np.array(row["ref_kl_weights"]) == 0] == pytest.approx(0)
    rehearse(root, "base", **opd(tmp_path))
    assert len(asked) == 2
    work = step_history(store, "base").steps[0].work
    assert work["reference"].inputs.keys() == {"rollout", "filtering"}, "a frozen teacher knows no policy"
    assert work["advantage"].inputs["reference"] == work["reference"].key
    config = session_for(root, "base", **opd(tmp_path)).config
    assert all("timing/stage/reference" in step["metrics"] for step in describe(store, "base", config)["steps"])


def test_a_recorded_run_is_credited_by_a_teacher_and_asks_for_nobody_else(tmp_path, root, asked):
    settings = opd(tmp_path)
    store = rehearse(root, "base", model=settings["model"])
    drawn = ["algorithm.type=opd", f"algorithm.teacher.path={tmp_path / 'teacher'}"]
    config = ask(root, from_stage="advantage", overrides=drawn)
    computed = missing(config)
    assert [piece.stage for piece in computed] == ["reference", "advantage", "packing", "metrics"] * 2
    assert needs(computed, config) == ["teachers"]
    walk(config)
    scored = rows(store, config.name, "reference", "references")
    assert len(asked) == 2 and scored
    assert {value for row in scored for value in row["logprobs"]} == {np.float32(SCORE)}
    assert len(rows(store, config.name, "advantage", "samples")) == len(rows(store, "base", "advantage", "samples"))


def test_settings_of_the_engine_mean_something_to_a_reference(taught):
    longer = "engine.max_model_len=1024"
    with pytest.raises(ConfigError, match="belongs to stage rollout"):
        ask(taught / "store", from_stage="packing", overrides=[longer])
    drawn = ["algorithm.type=opd", f"algorithm.teacher.path={taught / 'teacher'}"]
    assert ask(taught / "store", from_stage="advantage", overrides=[longer, *drawn]).engine.max_model_len == 1024


@pytest.mark.parametrize(
    ("algorithm", "own", "every", "expected"),
    [
        ("grpo", "", 0, {"engine"}),
        ("opd", "", 0, {"engine", "teachers"}),
        ("opsd", "", 0, {"engine"}),
        ("sft", "", 0, {"teachers"}),
        ("sft", "", 1, {"engine", "teachers"}),
        ("grpo", "sft", 0, {"teachers"}),
    ],
)
def test_only_who_is_needed_is_started(root, algorithm, own, every, expected):
    environments = tuple(each | {"algorithm": {"type": own} if own else None} for each in SMALL["environments"])
    changes = {"algorithm": {"type": algorithm}, "environments": environments, "evaluation": {"every": every}}
    session = session_for(root, "run", **changes)
    started = set(needs(plan_work(session.context, session.source), session.config))
    assert started == expected | {"environments", "learner"}


def test_an_evaluation_is_of_the_policy_and_is_found_whoever_taught_it(root):
    made = [session_for(root, "run", algorithm={"type": kind}).context for kind in ("grpo", "sft")]
    keys = [evaluation_contexts(place)[""].key(STAGE, 0, {}) for place in made]
    assert keys[0] == keys[1] and made[0].key(STAGE, 0, {}) != made[1].key(STAGE, 0, {})


def test_rollouts_of_a_teacher_do_not_depend_on_the_policy(root):
    def keys(**changes):
        session = session_for(root, "run", algorithm={"type": "sft"}, **changes)
        return [ref.key for ref in plan_work(session.context, session.source) if ref.stage == "rollout"]

    assert keys() == keys(training={"learning_rate": 1.0}) != []
