"""A full disk is one clear error; what was there stays, nothing half written is visible, and space makes it go on."""

import errno
import os
import resource
import subprocess
import sys
import textwrap
from uuid import uuid4

import pytest

from storage.errors import NoSpace
from storage.store import open_store
from tests.fixtures.faults import happened
from tests.fixtures.rows import append, entry, messages
from tests.fixtures.small_disks import mounted


@pytest.mark.fault(
    "disk",
    "disk or quota is full where the store writes",
    "one clear error; what was there stays; space makes it go on",
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
@pytest.mark.parametrize(
    "call", ["os.fsync", "storage.roots.make_directory", "storage.delta.table.StoredTable._write_commit"]
)
def test_wherever_space_runs_out(store, root, monkeypatch, call, number):
    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    good = append(store, 5)
    store.ledger.commit(entry("k", outputs=(good,)))
    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        with pytest.raises(NoSpace) as caught:
            append(store, 6, run="other", step=1, key="l", attempt="b")
        assert isinstance(caught.value.__cause__, OSError)
        happened(caught.value.__cause__)
        assert caught.value.do
        with pytest.raises(NoSpace):
            store.ledger.commit(entry("l", run="other"))
    for reader in (store, open_store(root)):
        assert reader.read([good]).equals(messages(5))
        assert [e.key for e in reader.ledger.entries()] == ["k"]
        assert reader.scan("messages").collect().height == 5
    again = append(store, 6, run="other", step=1, key="l", attempt="c")
    assert store.ledger.commit(entry("l", run="other", outputs=(again,))).outputs == (again,)
    assert store.scan("messages").collect().height == 11


@pytest.mark.engine
def test_a_limit_on_file_sizes_is_no_space(tmp_path):
    """A real refusal of the system, in a process of its own since the limit cannot be taken back."""
    script = f"""
        import resource, signal
        from storage.errors import NoSpace
        from storage.store import open_store
        from tests.fixtures.rows import append
        store = open_store({str(tmp_path / "s")!r})
        good = append(store, 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            append(store, 3000, 50, attempt="b")
        except NoSpace:
            print("told", store.read([good]).num_rows, len(store.slices.table("messages").active_files()))
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "told 2 1\n"), done.stderr
    assert len(list((tmp_path / "s/tables/messages/run=run").iterdir())) == 1  # what was half written is gone


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of one MiB."""
    yield from mounted(tmp_path / "disk", "1m")


def until_full(act):
    for number in range(500):
        try:
            act(number)
        except NoSpace:
            return number
    raise AssertionError("the disk was to fill up")


@pytest.mark.fault("disk", "a real file system fills up", "nothing committed is lost; space makes it go on")
@pytest.mark.engine
def test_a_real_disk_that_fills_up_loses_nothing(small_disk):
    store = open_store(small_disk / "store")
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 200_000)

    def step(number):
        made = append(store, 20, 200, step=number, key=f"k{number}", attempt=uuid4().hex)
        store.ledger.commit(entry(f"k{number}", outputs=(made,), step=number))

    done = until_full(step)
    assert done > 3
    happened(f"no space at step {done}")
    ballast.unlink()
    store = open_store(small_disk / "store")
    entries = store.ledger.entries()
    assert [e.step for e in entries] == list(range(len(entries))) and len(entries) in (done, done + 1)
    for each in entries:
        assert store.read(each.outputs).equals(messages(20, 200))
    for number in range(len(entries), len(entries) + 2):
        step(number)
    assert store.scan("messages").collect().height == 20 * (len(entries) + 2)
