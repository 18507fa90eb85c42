"""An environment whose code was edited: other keys, a run that is not resumed with it, and what a new run says."""

import pytest

from configs.errors import ConfigError
from flows import cli
from flows.queries.compare import compare
from flows.queries.store_reader import StoreReader
from flows.runtime.loop import plan_work
from flows.runtime.resolve_run import require_same, resolve_run
from storage.store import open_store
from tasks.runtime.run_context import RunContext
from tests.fixtures import builders, fixed, histories, replays
from tests.fixtures.rehearsal import SMALL, SOURCE, rehearse

OLD, NEW = "return 1.0\n", "return 2.0\n"


@pytest.fixture
def code(tmp_path, monkeypatch):
    """The file of a module that is no package."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "own_game.py"
    file.write_text(OLD)
    return file


def prepared(tmp_path, name, *overrides, files=("demo",), **settings):
    model = builders.model(tmp_path / "model", vocab_size=300, max_positions=4096)
    taskset = 'environments=[{name="game", taskset={id="own_game"}, harness={id="null"}}]'
    asked = [f"model.path={model}", taskset, *overrides] if files else overrides
    return resolve_run("train", files, asked, name=name, store=str(tmp_path / "store"), **settings)


def keys(config):
    """Return the keys of the run's first work by stage."""
    context = RunContext(open_store(config.store), config.name, config, {})
    return {ref.stage: ref.key for ref in reversed(plan_work(context, SOURCE, None))}


def test_a_new_run_finds_nothing_of_the_code_before(tmp_path, code):
    first = keys(prepared(tmp_path, "a", seed=1))
    assert keys(prepared(tmp_path, "b", seed=1)) == first
    code.write_text(NEW)
    edited = keys(prepared(tmp_path, "c", seed=1))
    assert {stage for stage in first if first[stage] == edited[stage]} == {"policy_import"}


@pytest.mark.parametrize("files", [(), ("demo",)])
def test_a_run_is_not_resumed_with_edited_code(tmp_path, code, files):
    begun = prepared(tmp_path, "a")
    histories.begun(begun)
    assert prepared(tmp_path, "a", files=files) == begun
    code.write_text(NEW)
    with pytest.raises(ConfigError) as refused:
        prepared(tmp_path, "a", files=files)
    (line,) = refused.value.problems
    assert line.startswith("environments.0.version: the code of environment 'game' is not what run 'a' began with")
    assert "recorded as own_game (not a package) sha256:" in line and "stagecoach replay a --regrade" in line
    code.write_text(OLD)
    assert prepared(tmp_path, "a", files=files) == begun


def test_recorded_rollouts_can_be_scored_by_edited_code(root, code):
    environment = {"name": fixed.ENVIRONMENT, "taskset": {"id": "own_game"}, "harness": {"id": "null"}}
    rehearse(root, "base", steps=1, environments=(environment | {"version": "own_game"},))
    config = replays.ask(root, regrade=True)
    code.write_text(NEW)
    edited = replays.ask(root, regrade=True)
    assert config.environments[0].version != edited.environments[0].version
    stages = [{piece.stage for piece in replays.pieces(each)} for each in (config, edited)]
    assert stages[0] == stages[1] == {"regrade", "filtering", "advantage", "packing", "metrics"}
    assert config.name != edited.name, "each has the scores of its own code"
    with pytest.raises(ConfigError, match=r"environments\.0\.version"):
        require_same(config, edited.model_copy(update={"name": config.name, "replay": config.replay}))


def test_check_and_diff_show_the_code(tmp_path, code, capsys):
    config = prepared(tmp_path, "a")
    asked = ["check", "demo", "environments.0.taskset.id=own_game", 'environments.0.harness={id="null"}']
    assert cli.main(asked) == 0
    assert f"own_game {config.environments[0].version}" in capsys.readouterr().out
    root, long = tmp_path / "rehearsed", "a-package-with-a-long-name 1.0 sha256:0123456789abcdef"
    for name, digest in (("a", "11"), ("b", "22")):
        version = f"{long}, game 1 sha256:{digest}"
        rehearse(root, name, steps=1, environments=({**SMALL["environments"][0], "version": version},))
    found = compare(StoreReader(open_store(root)), "a", "b")
    assert found["config"] == [
        {"key": "environments.0.version", "a": "game 1 sha256:11", "b": "game 1 sha256:22", "in_keys": True}
    ]
