"""A new store for each test, at a root whose name holds a space."""

import pytest

from storage.store import open_store
from tests.fixtures.s3_host import S3Host


@pytest.fixture
def root(request, tmp_path):
    """A directory, or with the parameter "s3" the URL of a place on the S3 server."""
    return request.getfixturevalue("s3_root") if getattr(request, "param", "") == "s3" else tmp_path / "my store"


@pytest.fixture
def store(root):
    return open_store(root)


@pytest.fixture
def long_ago(monkeypatch):
    """Runs that finish in a test finished long enough ago to be removed."""
    monkeypatch.setattr("storage.maintenance.plan.RECENT_HOURS", 0.0)


@pytest.fixture(scope="session")
def s3_host():
    """An S3 server on loopback, one for all tests."""
    host = S3Host()
    yield host
    host.stop()


@pytest.fixture
def s3(s3_host, monkeypatch):
    """The server, well-behaved before and after the test, in the environment as a user would name it."""
    for name, value in s3_host.environment.items():
        monkeypatch.setenv(name, value)
    s3_host.requests()
    yield s3_host
    s3_host.behave()


@pytest.fixture
def s3_root(s3):
    """The URL of a new place."""
    return s3.new_place()
