"""What tests of bad input stand on: a place to run commands in, and the guard that nothing is started there."""

from pathlib import Path

import pytest

from flows import cli
from flows.orchestration import server as prefect_api
from flows.replays import config as replay_config
from flows.services.process import Handle
from storage.policies.store import Policies
from storage.store import open_store
from tests.fixtures import builders
from tests.fixtures.faults import happened

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory, with nothing configured for Prefect or Weights & Biases and no way to the hub."""
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home/prefect"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for processes that a command starts
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def root(tmp_path):
    """The place of a store, which nobody has made yet."""
    return tmp_path / "store"


@pytest.fixture
def started(monkeypatch):
    """The names of services that were started, the Prefect server among them; none of them really is."""
    names = []

    def launch(handle):
        names.append(handle.spec.name)
        raise AssertionError(f"{handle.spec.name} was started")

    monkeypatch.setattr(Handle, "_launch", launch)
    yield names


@pytest.fixture
def refused(place, started, capsys):
    """Run a command that must be refused, and return what it says."""

    def run(*argv):
        store = place / "stagecoach-store"
        before = open_store(store).runs.names() if store.is_dir() else []
        capsys.readouterr()
        status = cli.main(argv)
        said = capsys.readouterr()
        assert status == 2
        assert said.err.startswith("stagecoach: ")
        assert "Traceback" not in said.err
        assert "nothing was" in said.err.lower()
        assert started == []
        happened(said.err)
        assert prefect_api._embedded is None
        assert (open_store(store).runs.names() if store.is_dir() else []) == before
        assert not list(store.glob("prefect*"))
        return said.err

    return run


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A store that has the weights of every policy."""
    monkeypatch.setattr(Policies, "directory", lambda self, key, verify=False: tmp_path)
    monkeypatch.setattr(replay_config, "config_versions", lambda config: {})


@pytest.fixture
def model(place):
    """A directory that looks like a model from afar."""
    return f"model.path={builders.model(place / 'model', max_positions=512)}"
