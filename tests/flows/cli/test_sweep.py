"""Sweeps: combinations of settings, the configs of their runs, and the table of results."""

import json

import pytest

from flows.cli import run as run_commands
from flows.cli.arguments import UsageError
from flows.cli.sweep import combinations, results, run_names
from flows.queries.store_reader import StoreReader
from storage.store import open_store
from tests.fixtures import evaluations, rehearsal


def train(root, name, steps, seed):
    """Walk a run that is evaluated after each step."""
    settings = {"evaluation": {"every": 1, "num_examples": evaluations.HELD_OUT}}
    evaluations.train(root, name, evaluations.Sampler(), steps=steps, seed=seed, **settings)


def test_every_combination_of_values_has_its_names():
    arms = combinations(["algorithm.type=grpo,rloo", "filtering.filters=[],[{type='errored'},{type='truncated'}]"])
    assert [[*arm.values()] for arm in arms] == [
        ["grpo", "[]"],
        ["grpo", "[{type='errored'},{type='truncated'}]"],
        ["rloo", "[]"],
        ["rloo", "[{type='errored'},{type='truncated'}]"],
    ]
    assert run_names("lr", {"training.learning_rate": "1e-5"}, 2) == ["lr-1e-5-s0", "lr-1e-5-s1"]


@pytest.mark.parametrize("over", [["steps"], ["steps="], ["seed=1,2"], ["steps=1", "steps=2"], ["=1"]])
def test_what_names_no_values_is_refused(over):
    with pytest.raises(UsageError, match="name each setting once"):
        combinations(over)


def test_everything_is_checked_before_the_first_run(call, tmp_path):
    status, text = call("sweep", "demo", "model.path=.", "--over", "training.learning_rate=1e-5,-1")
    assert status == 2 and "learning_rate" in text and "nothing was started" in text
    assert not open_store(tmp_path).runs.names()
    status, text = call("sweep", "demo", "model.path=.", "--over", "steps=1,1")
    assert status == 2 and "two combinations" in text
    status, text = call("sweep", "--from", "nobody:1", "--over", "training.learning_rate=1e-5,1e-4")
    assert status == 2 and "run 'nobody' has made no policy" in text


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A reader of runs of two, four and nine steps; held-out rewards rise by 0.1 with each policy, up to 1."""
    root = tmp_path_factory.mktemp("swept") / "store"
    for steps in (2, 4):
        for seed in (0, 1):
            train(root, f"sweep-{steps}-s{seed}", steps, seed)
    train(root, "large-s0", 9, 0)
    return StoreReader(open_store(root))


def test_results_are_means_over_seeds_beside_the_first_combination(compared):
    arms = combinations(["steps=2,4"])
    by_arm = [dict(enumerate(run_names("sweep", arm, 2))) for arm in arms]
    first, second = results(compared, arms, by_arm)
    assert first["difference"] is None and second["runs"] == ["sweep-4-s0", "sweep-4-s1"]
    assert second["held_out"]["value"] - first["held_out"]["value"] == pytest.approx(0.2)
    # Both seeds have the same difference, which knows no spread.
    assert second["difference"] == {"value": pytest.approx(0.2), "interval": None}
    assert len(first["rewards"]) == 2 and len(second["rewards"]) == 4


def test_a_pair_of_runs_has_the_interval_over_its_examples(compared):
    arms = combinations(["steps=2,4"])
    second = results(compared, arms, [{0: "sweep-4-s0"}, {0: "large-s0"}])[1]
    # The later policy earns 1 everywhere, the earlier one 0.50 to 0.55.
    low, high = second["difference"]["interval"].values()
    assert low < 0.475 < high and second["difference"]["value"] == pytest.approx(0.475)
    earlier = results(compared, arms, [{0: "large-s0"}, {0: "sweep-4-s0"}])[1]
    assert earlier["difference"]["value"] == pytest.approx(-0.475)
    # Runs of different seeds are no pair.
    assert results(compared, arms, [{0: "sweep-2-s0"}, {1: "sweep-4-s1"}])[1]["difference"] is None


def test_a_run_that_fails_leaves_the_others(call, tmp_path, monkeypatch):
    def runs(config, plain=False, watchers=()):
        if config.steps == 4:
            raise RuntimeError("the disk is gone")
        print("what a panel prints")
        train(tmp_path, config.name, config.steps, config.seed)

    monkeypatch.setattr(run_commands, "run_with_panel", runs)
    monkeypatch.setattr(
        "flows.cli.sweep.arm_configs",
        lambda files, overrides, arms, seeds, name, store: [
            rehearsal.session_for(tmp_path, f"{name}-{arm['steps']}-s0", steps=int(arm["steps"])).context.config
            for arm in arms
        ],
    )
    status, text = call("sweep", "demo", "model.path=.", "--over", "steps=2,4", "--store", str(tmp_path))
    assert status == 1 and "the disk is gone" in text and "sweep-4-s0 failed" in text
    assert "/runs/sweep-2-s0" in text
    status, text = call("sweep", "demo", "model.path=.", "--over", "steps=2", "--store", str(tmp_path), "--json")
    assert status == 0 and json.loads(text.splitlines()[0])[0]["runs"] == ["sweep-2-s0"]
