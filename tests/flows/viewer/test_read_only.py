"""Looking changes nothing: no byte, no name and no time in a store, whatever is opened and however little is there."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.queries.store_reader import StoreReader
from storage.read.frames import existing_store
from storage.store import LAYOUT, open_store
from tests.fixtures.rehearsal import SMALL, rehearse
from tests.flows.viewer.looking import everything, formed, traces, visitor
from tests.storage.conftest import s3, s3_host, s3_root  # noqa: F401

pytestmark = pytest.mark.engine
FORMS = ("html", "json", "file")
NOBODY = 65534
CHECKOUT = Path(__file__).parents[3]
OPENING = """
import os, sys
from tests.flows.viewer.looking import everything, visitor
from flows.queries.store_reader import StoreReader

def look():
    library = StoreReader.at(sys.argv[1])
    client = visitor(library)
    pages = everything(library, "other")
    # A search is a process of its own, which that user may start where he may read this Python.
    pages = [each for each in pages if os.access(sys.executable, os.X_OK) or "/search" not in each]
    return [client.get(each).status_code for each in pages]

look()  # what is imported only when it is needed may lie where nobody can read
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
try:
    open(sys.argv[1] + "/format.json", "a")
except PermissionError:
    print(*look())
"""


def state(root):
    """Every file and directory below a root: its size, times and mode, and what it holds."""
    found = {}
    for path in (root, *root.rglob("*")):
        seen = path.lstat()
        found[path] = seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, path.read_bytes() if path.is_file() else b""
    return found


def look_at_all(library, *only):
    """Open every address, of all runs or of some, in every form and ask for its mark; return how each was answered."""
    client = visitor(library)
    answers = [client.get(formed(each, form)).status_code for each in everything(library, *only) for form in FORMS]
    return [*answers, client.get("/mark").status_code, client.post("/").status_code]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    place = tmp_path_factory.mktemp("read") / "store"
    rehearse(place, "base")
    rehearse(place, "other", seed=8, steps=1)
    return place


def test_opening_everything_twice_changes_nothing(root):
    before = state(root)
    first = look_at_all(StoreReader.at(root))
    assert len(first) > 40 and set(first[:-1]) == {200} and first[-1] == 405
    assert set(look_at_all(StoreReader.at(root), "other")[:-1]) == {200}
    assert state(root) == before
    rehearse(root, "again", seed=9, steps=1)
    assert state(root) != before  # so it is seen where somebody writes


def test_a_terminal_changes_nothing(root, command):
    trace = next(traces(StoreReader.at(root), "base"))
    before = state(root)
    for arguments in (["traces", "base"], ["traces", "latest", "--where", "reply ~ 'x'"], ["trace", trace]):
        command(root, *arguments)
    command(root, "trace", "none", status=2)
    assert state(root) == before


def test_a_store_that_holds_nothing_yet_stays_so(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    (root / "format.json").write_text(json.dumps({"layout": LAYOUT}))
    before = state(root)
    library = StoreReader.at(root)
    client = visitor(library)
    for form in FORMS:
        assert client.get(formed("/", form)).status_code == 200
        for address in ("/runs/a", "/runs/a/steps/0", "/traces/x", "/compare?a=a&b=b"):
            assert client.get(formed(address, form)).status_code == 404, address
    first = client.get("/mark").json()
    assert state(root) == before
    rehearse(root, "base", steps=1)  # what comes later is seen by the same viewer
    assert client.get("/mark").json() != first and client.get("/runs/base").status_code == 200


def test_a_run_that_has_just_started_can_be_looked_at(tmp_path):
    root = begun_store(tmp_path)
    before, client = state(root), visitor(root)
    for form in FORMS:
        for address, status in {"/": 200, "/runs/new": 200, "/runs/new/steps/0": 404}.items():
            assert client.get(formed(address, form)).status_code == status, address
        assert client.get(formed("/compare?a=new&b=new", form)).status_code < 500
    assert "new" in client.get("/").text
    assert state(root) == before


def test_a_store_that_nobody_may_write_to_can_be_looked_at(root):
    """Root may write anywhere: a process of a user without rights looks."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    # Not below pytest's own directory, which others may not enter: every session of pytest that begins sees to that.
    with tempfile.TemporaryDirectory() as place:
        store = Path(place) / "store"
        shutil.copytree(root, store)
        Path(place).chmod(0o755)
        for each in (store, *store.rglob("*")):
            each.chmod(0o555 if each.is_dir() else 0o444)
        before = state(store)
        code = OPENING.format(nobody=NOBODY)
        done = subprocess.run(
            [sys.executable, "-c", code, str(store)], cwd=CHECKOUT, capture_output=True, text=True, timeout=240
        )
        assert set(done.stdout.split()) == {"200"}, done.stdout + done.stderr
        assert state(store) == before


def test_what_would_write_is_a_fault_and_writes_nothing(tmp_path):
    root = begun_store(tmp_path)
    before = state(root)
    store = existing_store(root, read_only=True)
    with pytest.raises(AssertionError, match="only read"):
        started(store, "more")
    with pytest.raises(AssertionError, match="only read"):
        store.quarantines.record(["t"], where="here", reason="so")
    assert state(root) == before


def started(store, run):
    config = RunConfig.model_validate(SMALL | {"name": run, "store": store.root.address})
    store.runs.record(run=run, event="started", kind="train", config=config.model_dump(mode="json"))


def begun_store(directory):
    """The root of a store with a run that has just started."""
    started(open_store(directory / "store"), "new")
    return directory / "store"
