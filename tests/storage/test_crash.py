"""A writer killed at any moment: what it acknowledged is there once, and nothing half done is visible."""

import random
import subprocess
import sys
import time

import pytest

from storage.store import open_store
from tests.fixtures.faults import happened
from tests.fixtures.rows import messages

pytestmark = pytest.mark.engine


def killed(root, count, seconds, *arguments):
    """Run a writer, kill it with SIGKILL some time after so many acknowledgements, and return all that it gave."""
    command = [sys.executable, "-m", "tests.fixtures.writer", str(root), *arguments]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        first = "".join(writer.stdout.readline() for _ in range(count))
        time.sleep(seconds)
    finally:
        writer.kill()
    rest, _ = writer.communicate()
    assert writer.returncode == -9, "the writer was to die by SIGKILL"
    lines = (first + rest).splitlines(keepends=True)
    return [int(line) for line in lines if line.endswith("\n")]


@pytest.mark.fault("process", "a writer is killed ten times at random", "each acknowledged step is there once")
def test_steps_of_a_killed_writer_are_whole_and_once(root):
    chance = random.Random(6)
    acknowledged = []
    orphans = 0
    for attempt in range(10):
        acknowledged += killed(root, chance.randint(1, 6), chance.uniform(0.0, 0.05), "steps", f"attempt{attempt}")
        store = open_store(root)
        entries = store.ledger.entries()
        steps = [entry.step for entry in entries]
        assert steps == list(range(len(steps))), "each step once, none skipped"
        assert set(acknowledged) <= set(steps), "nothing acknowledged is lost"
        assert len(steps) - len(acknowledged) <= attempt + 1, "at most one unacknowledged commit for each kill"
        for entry in entries:
            assert store.read(entry.outputs).equals(messages(2 + entry.step % 3))
        rows = sum(2 + step % 3 for step in steps)
        assert store.scan("messages").collect().height == rows, "no orphan is visible, nothing is doubled"
        orphans = len(store.slices.table("messages").active_files()) - len(steps)
    happened(f"10 kills, {len(acknowledged)} steps acknowledged")
    assert len(acknowledged) == len(set(acknowledged)) > 20
    assert orphans >= 0


@pytest.mark.fault(
    "process", "a publisher of weights is killed eight times at random", "each policy is complete or absent"
)
def test_policies_of_a_killed_publisher_are_complete_or_absent(root):
    chance = random.Random(7)
    acknowledged = set()
    for attempt in range(8):
        acknowledged |= set(killed(root, 1, chance.uniform(0.0, 0.1), "policies", f"attempt{attempt}"))
        store = open_store(root)
        names = store.policies.names()
        assert {f"policy-{number}" for number in acknowledged} <= set(names)
        for name in names:
            directory = store.policies.directory(name, verify=True)
            assert sorted(path.name for path in directory.iterdir()) == [
                "config.json",
                "manifest.json",
                "model.safetensors",
                "tokenizer.json",
            ]
    happened(f"8 kills, {len(acknowledged)} policies acknowledged")
    visible = [path.name for path in (root / "policies").iterdir() if not path.name.startswith(".")]
    assert sorted(visible) == sorted(names)
