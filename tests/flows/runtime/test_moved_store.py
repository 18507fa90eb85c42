"""A moved store: paths that its configs name inside it are followed, and weights that are gone are not missed."""

import shutil
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.run import RunConfig
from configs.store_paths import STORE, absolute_paths, relative_paths
from flows.runtime import loop
from flows.runtime.resolve_run import resolve_run, source_of
from flows.runtime.session import Session, record_run
from flows.services.base import Supervisor
from storage.store import open_store
from tasks.runtime.run_context import RunContext
from tasks.training import policy as policy_import
from tests.fixtures import builders, rehearsal
from tests.fixtures.commands import run_command
from tests.fixtures.histories import finish, policy_row, record_policy

KEY = "training-warm"
SMALL = ("assignment.groups_per_step=2", "assignment.group_size=2")


def imported(tables, config, *, key, source, directory):
    """Stand in for the learner that measures weights which are brought in: they are copied alone."""
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
    return {"policies": policy_row(key, 0, None, False)}


@pytest.fixture(autouse=True)
def importing(monkeypatch):
    stage = builders.stand_in(policy_import.STAGE, imported)
    monkeypatch.setitem(rehearsal.STAND_INS, "policy_import", stage)
    monkeypatch.setattr("storage.maintenance.plan.RECENT_HOURS", 0.0)


def go_on(config):
    """Go through a run; return the work that it had not recorded."""
    store = open_store(config.store)
    before = {entry.row_id for entry in store.ledger.entries()}
    session = Session(RunContext(store, config.name, config, {}), source_of(config), Supervisor(config.name, Path("x")))
    with record_run(session):
        for _ in loop.train_steps(rehearsal.Rehearsal(session), session.source):
            pass
    return [(entry.stage, entry.step) for entry in store.ledger.entries() if entry.row_id not in before]


def resumed(store, steps=2, *overrides):
    """Return the config with which the run goes on."""
    return resolve_run("train", (), overrides, name="first", store=str(store), steps=steps)


def begin(store, model):
    asked = [*SMALL, f"model.path={model}"]
    config = resolve_run("train", ["demo"], asked, name="first", store=str(store.root.directory), seed=1, steps=1)
    assert ("policy_import", 0) in go_on(config)
    return config


@pytest.fixture
def moved(tmp_path):
    """A store at a new place, in which a run trained from weights that another run of the store made."""
    store = open_store(tmp_path / "old" / "store")
    store.runs.record(run="warm-up", event="started", kind="sft", config={})
    store.policies.publish(builders.model(tmp_path / "model", max_positions=4096), KEY)
    record_policy(store, KEY, policy_row(KEY, 1, None, True), run="warm-up")
    finish(store, "warm-up")
    begin(store, store.policies.directory(KEY))
    (tmp_path / "new").mkdir()
    return (tmp_path / "old" / "store").rename(tmp_path / "new" / "store")


def test_a_run_of_a_moved_store_goes_on(moved):
    recorded = open_store(moved).runs.config("first")
    assert recorded["model"]["path"] == f"{STORE}policies/{KEY}", "recorded relative to the store"
    config = resumed(moved)
    assert config.model.path == str(moved / "policies" / KEY)
    assert {step for _, step in go_on(config)} == {1}, "what was recorded is found"


def test_weights_that_the_config_of_a_kept_run_names_stay(moved, capsys):
    assert run_command(capsys, "gc", "--force", "warm-up", "--yes", "--store", str(moved))[0] == 0
    assert open_store(moved).policies.find(KEY)
    assert resumed(moved).model.path.endswith(KEY)


def test_a_run_whose_model_directory_is_gone_goes_on_from_the_store(tmp_path, root):
    store, model = open_store(root), builders.model(tmp_path / "model", max_positions=4096)
    begin(store, model)
    model.rename(tmp_path / "elsewhere")
    config = resumed(root)
    assert Path(config.model.path).parent == root / "policies"
    assert {step for _, step in go_on(config)} == {1}
    named = f"model.path={tmp_path / 'elsewhere'}"
    config = resumed(root, 3, named)
    assert {step for _, step in go_on(config)} == {2}
    builders.model(tmp_path / "elsewhere", b"other weights", max_positions=4096)
    with pytest.raises(ConfigError, match=r"model\.path: run 'first' began with other content"):
        resumed(root, 3, named)


@pytest.mark.parametrize(
    ("store", "path", "now"),
    [
        ("/old/store", "/old/store/policies/k", "policies/k"),
        ("stagecoach-store", "/home/x/stagecoach-store/policies/k", "policies/k"),
        (".", "/home/x/policies/k", "policies/k"),
        ("/old/store", "/other/policies/k", None),  # of another store
        ("/old/store", "/old/store/policies/gone", None),
        ("/old/store", "org/model", None),
        ("/old/store", f"{STORE}policies/gone", "policies/gone"),
    ],
)
def test_recorded_paths_are_looked_for_in_the_store(tmp_path, store, path, now):
    (tmp_path / "policies" / "k").mkdir(parents=True)
    config = RunConfig.model_validate(rehearsal.SMALL | {"store": store, "model": {"path": path}})
    found = absolute_paths(config, tmp_path)
    assert (found.store, found.model.path) == (str(tmp_path), str(tmp_path / now) if now else path)
    assert relative_paths(found, tmp_path).model.path == (f"{STORE}{now}" if now else path)
