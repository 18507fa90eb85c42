"""One small model and one uninterrupted run that all others are compared with."""

import pytest

from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.driving import SETTINGS, Driven


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The weights that all runs start from."""
    return tiny_qwen3(tmp_path_factory.mktemp("crash-model") / "tiny", hidden=64, layers=2, seed=3)


@pytest.fixture(scope="session")
def drive(model, tmp_path_factory):
    """Makes a run in a directory of its own, which is DIRECTORY in settings of its own beside those that all have."""

    def make(*overrides):
        directory = tmp_path_factory.mktemp("crash")
        own = (each.replace("DIRECTORY", str(directory)) for each in overrides)
        return Driven(directory, (*SETTINGS, f"model.path={model}", *own))

    return make


@pytest.fixture(scope="session")
def uninterrupted(drive):
    """A run that nobody killed."""
    run = drive()
    life = run.live()
    assert life.status == 0, life.output
    (run.directory / "all_moments.jsonl").write_text("\n".join(life.moments))
    return run
