"""The demo as a person meets it: the command, what it prints, what it leaves, and the second time."""

import json
import os
from pathlib import Path

import pytest

from tests.acceptance.lives import stagecoach

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

STARTED_REWARD, LEARNT_REWARD = (
    0.25,
    0.75,
)  # what the demo promises, on the first step and on the mean of the last three

TAUGHT_REWARD = 0.6
"""Of held-out examples after five steps with a teacher; 0.83 and 0.86 were seen."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Where the demo keeps everything."""
    return str(tmp_path_factory.mktemp("demo") / "store")


@pytest.fixture(scope="module")
def first(store):
    """What the demo printed the first time."""
    return stagecoach("demo", "--store", store)


def shown(store, run="latest"):
    """Return the run as programs see it."""
    return dict(json.loads(stagecoach("show", "--json", run, "--store", store)))


def test_the_model_learns(first, store):
    rewards = [step["reward"] for step in shown(store)["steps"]]
    assert len(rewards) == 20
    assert rewards[0] <= STARTED_REWARD
    assert sum(rewards[-3:]) / 3 >= LEARNT_REWARD
    assert shown(store)["state"] == "finished"


def test_it_says_what_was_learnt_and_what_to_try(first, store):
    assert "The model was trained to reverse text" in first and store in first
    assert "20 steps, reward " in first and "held-out +" in first
    commands = [line.split() for line in first.split("Try next:")[1].splitlines() if line.strip()]
    assert [command[:2] for command in commands] == [
        ["stagecoach", name] for name in ("view", "show", "replay", "resume")
    ]
    assert "demo" in stagecoach(*commands[1][1:]) and "to compute" in stagecoach(*commands[2][1:], "--dry-run")


def test_every_rollout_is_there_and_scored_where_it_could_be(first, store):
    steps = shown(store)["steps"]
    assert all(step["num_traces"] >= 128 for step in steps)
    timed = {f"timing/stage/{stage}" for stage in ("assignment", "rollout", "filtering", "training")}
    assert all(step["metrics"].keys() >= timed for step in steps)


def test_the_second_time_nothing_is_computed(first, store):
    count = ("sql", "select count(*) as rows from ledger", "--store", store)
    before = stagecoach(*count)
    assert "; 0 computed, " in stagecoach("demo", "--store", store)
    assert stagecoach(*count) == before, "neither the warm-up nor the training added a result"


def test_secrets_are_not_in_the_logs(first, store):
    text = "".join(path.read_text(errors="replace") for path in Path(store, "logs").rglob("*.log"))
    assert "engine" in text
    for name, value in os.environ.items():
        if name.endswith(("_KEY", "_TOKEN")) and len(value) >= 8:
            assert value not in text


# A setting of each stage, and whether the same weights come out: the first leaves the batches as they are.
CHANGES = {
    "filtering": ("filtering.filters.2.tolerance=1e-8", True),
    "advantage": ("algorithm.type=rloo", False),
    "packing": ("packing.tokens_per_row=1024", False),
    "training": ("training.learning_rate=1e-4", False),
}
AFTER = ("filtering", "advantage", "packing", "training")


@pytest.mark.parametrize("stage", AFTER)
def test_a_replay_of_the_demo_finds_everything(first, store, stage):
    printed = stagecoach("replay", "demo", "--from", stage, "--store", store)
    num_pieces = 20 * len([*AFTER[AFTER.index(stage) :], "metrics"])
    assert f"0 pieces of work computed, {num_pieces} cached" in printed
    assert "weights are the recorded ones at every step" in printed
    assert "Prefect:" not in printed, "a server was started for nothing"


@pytest.mark.nightly
@pytest.mark.parametrize("stage", AFTER)
def test_a_changed_replay_of_the_demo_computes_what_follows(first, store, stage):
    setting, same = CHANGES[stage]
    printed = stagecoach("replay", "demo", "--set", setting, "--steps", "1:3", "--store", store)
    num_pieces = 2 * len([*AFTER[AFTER.index(stage) :], "metrics"])
    assert f"from {stage}: {num_pieces} pieces of work computed, 0 cached" in printed
    told = "weights are the recorded ones at every step" if same else "weights part from the recorded ones at step 1"
    assert told in printed
    assert not list(Path(store, "logs").glob(f"demo-{stage}-*/engine.log")), "an engine was started"


# Where a run says who its teacher is: it samples what is trained on, or scores what the policy samples.
TAUGHT = {"sft": "environments.0.algorithm", "opd": "algorithm"}


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", TAUGHT)
def test_the_last_policy_of_the_demo_teaches_its_first(first, store, tmp_path, algorithm):
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    weights = ["export", "demo", "--format", "weights", "--store", store, "--to"]
    stagecoach(*weights, str(teacher))
    stagecoach(*weights, str(student), "--policy", "demo:0")
    settings = [f"name={algorithm}", "seed=17", "steps=5", "evaluation.every=5", f"model.path={student}"]
    settings += [f"{TAUGHT[algorithm]}.type={algorithm}", f"{TAUGHT[algorithm]}.teacher.path={teacher}"]
    stagecoach("run", "demo", *settings, "--store", store)
    before, after = (each["scores"][0]["average"] for each in shown(store, algorithm)["evaluations"])
    assert before <= STARTED_REWARD and after >= TAUGHT_REWARD


@pytest.mark.nightly
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preferences_of_the_demo_raise_the_share_of_right_answers(first, store, loss):
    stagecoach("dpo", "dpo_demo", f"training.loss.type={loss}", "seed=1", f"name={loss}", "--store", store)
    before, after = (each["scores"][0]["average"] for each in shown(store, loss)["evaluations"])
    assert before <= STARTED_REWARD and after >= before + 0.15, "0.41 and 0.82 were seen, from 0.10"
    assert "of demo]" in stagecoach("lineage", loss, "--store", store), "the rollouts that it prefers"
