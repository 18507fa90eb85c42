"""A new store for each test, at a root whose name holds a space."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.store import Store, open_store
from tests.fixtures.s3_host import S3Host


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """A directory, or with the parameter "s3" the URL of a place on the S3 server."""
    return request.getfixturevalue("s3_root") if getattr(request, "param", "") == "s3" else tmp_path / "my store"


@pytest.fixture
def store(root: Path | str) -> Store:
    return open_store(root)


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that finish in a test finished long enough ago to be removed."""
    monkeypatch.setattr("storage.maintenance.plan.RECENT_HOURS", 0.0)


@pytest.fixture(scope="session")
def s3_host() -> Iterator[S3Host]:
    """An S3 server on loopback, one for all tests."""
    host = S3Host()
    yield host
    host.stop()


@pytest.fixture
def s3(s3_host: S3Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Host]:
    """The server, well-behaved before and after the test, in the environment as a user would name it."""
    for name, value in s3_host.environment.items():
        monkeypatch.setenv(name, value)
    s3_host.requests()
    yield s3_host
    s3_host.behave()


@pytest.fixture
def s3_root(s3: S3Host) -> str:
    """The URL of a new place."""
    return s3.new_place()
