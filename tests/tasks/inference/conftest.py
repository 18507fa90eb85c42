"""Fixtures of the tests of inference."""

import pytest

from tests.fixtures.hosts import PLUGINS, view_of


def make_importable(patch):
    """Make the tests' own tasksets importable, here and in the processes that are started."""
    patch.syspath_prepend(PLUGINS)
    patch.setenv("PYTHONPATH", str(PLUGINS))


@pytest.fixture
def plugins(monkeypatch):
    """The tests' own tasksets are importable."""
    make_importable(monkeypatch)


@pytest.fixture(scope="module")
def plugins_of_module():
    """The same for the services that the tests of a file share."""
    with pytest.MonkeyPatch.context() as patch:
        make_importable(patch)
        yield


@pytest.fixture
def view(models):
    """Builds the config view of a rollout stage."""

    return lambda environment, **rollout: view_of(models["a"], environment, **rollout)
