"""Showing a run: for people, for programs, and what a change would compute again."""

import json
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.run import RunConfig
from flows import show
from storage.store import Store, open_store
from tasks.stage import Place, Ref, Stage, Tables, perform
from tests.builders import table, trace


def finished_run(root: Path) -> Store:
    """A store with one recorded run of one step whose rollouts are there, one of them errored."""
    store = open_store(root)
    config = RunConfig(name="a", steps=2)
    store.runs.record(run="a", event="started", kind="train", config=config.model_dump(mode="json"))
    rows = [trace("t0", reward=1.0), trace("t1", reward=0.0), trace("t2", reward=None, error_class="timeout")]
    made: Tables = {"traces": table("traces", rows)}
    stage = Stage("rollout", 1, (), ("traces",), ("rollout",), lambda tables, view: made)
    perform(stage, Place(store, "a", config, {}), 0)
    return store


def test_a_run_is_described_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(tmp_path)
    assert show.main("latest", store=str(tmp_path), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    (step,) = found["steps"]
    assert (found["run"], found["state"], found["num_steps"]) == ("a", "started", 2)
    assert step["reward"] == 0.5  # the errored rollout has no reward, which is not a reward of zero
    assert step["rows"] == {"rollout": {"traces": 3}} and step["tokens"] == {"rollout": 15}
    assert step["seconds"]["rollout"] >= 0.0 and step["shared"] == []


def test_a_run_is_shown_to_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished_run(tmp_path)
    show.main("a", store=str(tmp_path))
    printed = capsys.readouterr().out
    assert "train a: started, 1/2 steps" in printed and "rollout s" in printed and "0.5" in printed


def test_an_unknown_run_is_an_error_that_names_the_known(tmp_path: Path) -> None:
    finished_run(tmp_path)
    with pytest.raises(ConfigError, match="there is no run 'b'; the last runs are: a"):
        show.main("b", store=str(tmp_path))


def test_what_another_run_computed_is_marked(tmp_path: Path) -> None:
    store = finished_run(tmp_path)
    config = RunConfig(name="b", steps=2)
    store.runs.record(run="b", event="started", kind="train", config=config.model_dump(mode="json"))
    stage = Stage("rollout", 1, (), ("traces",), ("rollout",), lambda tables, view: pytest.fail("is in the ledger"))
    ref: Ref = perform(stage, Place(store, "b", config, {}), 0)
    assert not ref.computed
    assert show.describe(store, "b", config)["steps"][0]["shared"] == ["rollout"]


def test_evaluation_rollouts_are_not_taken_for_a_step(tmp_path: Path) -> None:
    store = finished_run(tmp_path)
    config = RunConfig(name="a", steps=2)
    stage = Stage("rollout", 1, (), ("traces",), (), lambda tables, view: {"traces": table("traces", [trace()])})
    chosen = Ref("evaluation_assignment", 0, "k", (), 0, 0.0, True)
    perform(stage, Place(store, "a", config, {}), 0, (chosen,))
    assert show.describe(store, "a", config)["steps"][0]["rows"]["rollout"] == {"traces": 3}


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        show.main("latest", store=str(tmp_path))
