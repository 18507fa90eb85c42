"""Scratch directories go with the process that wanted them: by itself, or by whoever makes the next one."""

import subprocess
import sys
from pathlib import Path

from storage.policies.scratch import ScratchDirectories

HOLDER = """
import sys
from pathlib import Path
from storage.policies.scratch import ScratchDirectories
scratches = ScratchDirectories(Path(sys.argv[1]))
path = scratches.make("theirs")
(path / "model.safetensors").write_text("half")
print(path, flush=True)
sys.stdin.read()
"""


def test_only_those_of_the_dead_are_removed(tmp_path):
    scratches = ScratchDirectories(tmp_path / "scratch")
    mine = scratches.make("mine")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "scratch")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        second = scratches.make("mine")
        assert sorted(scratches.directory.iterdir()) == sorted([mine, second, theirs]), "the living keep theirs"
        assert (theirs / "model.safetensors").exists()
    finally:
        holder.kill()
        holder.communicate()
    third = scratches.make("mine")
    assert sorted(scratches.directory.iterdir()) == sorted([mine, second, third])


def test_what_is_discarded_is_gone_and_what_was_moved_away_stays(tmp_path):
    scratches = ScratchDirectories(tmp_path / "scratch")
    moved, dropped = scratches.make("moved"), scratches.make("dropped")
    place = moved.rename(tmp_path / "place")
    for each in (moved, dropped, tmp_path):
        scratches.discard(each)
    assert place.is_dir() and not dropped.exists()
    assert list(scratches.directory.iterdir()) == []


def test_where_locks_do_not_work_nothing_is_removed(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", no_locks)
    first = ScratchDirectories(tmp_path / "scratch").make("first")
    second = ScratchDirectories(tmp_path / "scratch").make("second")
    assert first.is_dir() and second.is_dir()
