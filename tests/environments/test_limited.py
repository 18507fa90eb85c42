"""The guardian of a program: it ends with its command, and leaves nothing of it."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from program.harness import LIMITED

from tests.fixtures.waiting import PATIENCE


@pytest.fixture
def run(tmp_path):
    """A function that runs a shell's command in limits and returns its status and what it printed."""
    (tmp_path / "prompt.txt").write_text("the prompt")

    def run(command, seconds=PATIENCE):
        arguments = [sys.executable, "-I", "-S", str(LIMITED), str(seconds), "1000000", "PATH", "sh", "-c", command]
        reading, writing = os.pipe()  # the environment server's end stays open
        try:
            done = subprocess.run(arguments, stdin=reading, capture_output=True, text=True, cwd=tmp_path, check=False)
        finally:
            os.close(reading), os.close(writing)
        return done.returncode, done.stdout + done.stderr

    return run


def test_what_it_printed_last_and_its_status_are_passed_on(run):
    status, text = run("cat; exit 3")
    assert status == 3 and "the prompt" in text


def test_a_child_that_prints_for_ever_does_not_keep_it(run, tmp_path):
    began = time.monotonic()
    status, _ = run("(while :; do echo more; sleep 0.01; done) & echo $! > child; exit 0")
    assert status == 0 and time.monotonic() - began < PATIENCE
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
