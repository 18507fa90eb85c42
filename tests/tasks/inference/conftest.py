"""Fixtures of the tests of inference."""

import pytest

from tests.fixtures.hosts import PLUGINS, view_of


@pytest.fixture
def plugins(monkeypatch):
    """Make the tests' own tasksets importable, here and in the processes that are started."""
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))


@pytest.fixture
def view(models):
    """Builds the config view of a rollout stage."""

    return lambda environment, **rollout: view_of(models["a"], environment, **rollout)
