"""What holds for all tests: where their files lie, GPU tests without a GPU are skipped, and no property is timed."""

import os
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from storage.policies.scratch import Scratches
from tasks.runtime.quick_imports import quick_imports

# A busy machine is no fault of the code. Examples are new at every run, so that few at a time come to many.
settings.register_profile("untimed", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

HAS_GPU = Path("/dev/nvidiactl").exists()
MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 2 * 2**30
PLACE: pytest.StashKey[tuple[Scratches, Path]] = pytest.StashKey()
WHOLE_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.(\w+)", re.MULTILINE)
WITH_ENGINES = ("engine", "acceptance")
MARKED = re.compile(rf"\bpytest\.mark\.({'|'.join(WITH_ENGINES)})\b")


def pytest_configure(config: pytest.Config) -> None:
    """Put the files of tests that start no engine into memory: making a commit durable on a disk is most of their time.

    The disk is used where memory is scarce, as in a container with a small /dev/shm, and where a person named a place.
    What earlier runs left there (after a failure, for people to look at) goes now; that of a run at work stays.
    """
    # Files with the most tests go first, so that no worker is left with a long one at the end. With engines the number
    # of tests says nothing of the time: there files go by their names, whole runs first and what takes seconds last.
    config.option.loadscopereorder = "not engine" in config.option.markexpr
    pure = "not engine" in config.option.markexpr and "TMPDIR" not in os.environ and not config.option.basetemp
    if pure and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH_BYTES:
        scratches = Scratches(MEMORY / f"stagecoach-tests-{os.getuid()}")
        config.stash[PLACE] = scratches, scratches.make("run")
        os.environ["TMPDIR"] = tempfile.tempdir = str(config.stash[PLACE][1])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Read all files of tests, and what they import, without the garbage collector."""
    with quick_imports():
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file unread whose tests are all deselected by `-m`: to import it may be to load torch or an engine.

    That is a file that is marked as a whole where its mark is left out, and one without any mark where only tests with
    engines are asked for. Each is read by one half of `make test`, so that one that cannot be imported is noticed.
    """
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    chosen, text = config.option.markexpr.split(" and "), collection_path.read_text()
    whole = WHOLE_FILE.search(text)
    if chosen[0] == f"({' or '.join(WITH_ENGINES)})":
        return None if whole or MARKED.search(text) else True
    return True if "not engine" in chosen and whole and f"not {whole[1]}" in chosen else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Give the memory back; after a failure the files stay until the next run."""
    if exitstatus != pytest.ExitCode.TESTS_FAILED and PLACE in session.config.stash:
        scratches, place = session.config.stash[PLACE]
        scratches.discard(place)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without an NVIDIA device; refuse marks that leave a file unread."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA device"))
    for path in {item.path for item in items if any(map(item.get_closest_marker, WITH_ENGINES))}:
        if not MARKED.search(path.read_text()):
            raise pytest.UsageError(f"{path}: write pytest.mark.NAME in the file itself: by its text it is read")
