"""A disk that takes nothing more in the middle of a run: one message, all stays readable, and the run goes on."""

import subprocess

import pytest

from storage.errors import StoreError
from storage.store import open_store
from tests.fixtures import rehearsal
from tests.fixtures.commands import run_command
from tests.fixtures.faults import happened
from tests.fixtures.small_disks import mounted


@pytest.fixture
def disk(tmp_path):
    """A real file system of its own."""
    yield from mounted(tmp_path / "disk", "64m")


def remount(disk, how):
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


@pytest.mark.fault("disk", "the store's disk becomes read-only within a step", "one message; writable, the run goes on")
def test_a_run_ends_in_words_and_goes_on_once_the_disk_is_writable(disk, monkeypatch, capsys):
    def sampled(*arguments, step, policy):
        if step == 1:
            remount(disk, "ro")
        return rehearsal.sampled(*arguments, step=step, policy=policy)

    root = disk / "store"
    with monkeypatch.context() as patch:
        rehearsal.play(patch, rollout=sampled)
        with pytest.raises(StoreError, match="the disk is read-only") as refused:
            rehearsal.rehearse(root, "base")
    happened(refused.value.__cause__)
    assert refused.value.where.startswith(str(root)) and refused.value.safe and "writable" in refused.value.do
    before = {entry.key for entry in open_store(root).ledger.entries()}
    status, shown = run_command(capsys, "show", "base", "--store", str(root))
    assert status == 0 and "1/2 steps" in shown
    status, said = run_command(capsys, "note", "base", "a word", "--store", str(root))
    assert status == 2 and "the disk is read-only" in said
    remount(disk, "rw")
    after = [entry.key for entry in rehearsal.rehearse(root, "base").ledger.entries()]
    assert before < {*after} and len(after) == len({*after})
