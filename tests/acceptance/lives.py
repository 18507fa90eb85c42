"""The command line, and lives of a real run that kills its services or itself, each in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flows.services.ownership import marked_processes
from storage.store import open_store
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.driving import ROOT

SMALL = str(Path(__file__).with_name("small.toml"))
PLUGINS = ROOT / "tests/fixtures/plugins"
VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}


def stagecoach(*arguments, cwd=ROOT, status=0):
    """Run the command line as a person would and return what it printed; no process of it may be left."""
    command, variables = [sys.executable, "-P", "-m", "flows.cli", *arguments], os.environ | VARIABLES
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=cwd, env=variables, **pipes) as process:
        printed, _ = process.communicate(timeout=1500)
    assert process.returncode == status, printed[-5000:]
    assert [name for _, owner, name in marked_processes() if owner.startswith(f"{process.pid}:")] == []
    return str(printed)


class LivedRun:
    """A run of a small model in a directory, which one process after the other works on; used as a context."""

    def __init__(self, directory, *overrides, plugins=False):
        """`plugins` lets environments import modules of `tests/fixtures/plugins`."""
        self.directory, self._plugins = directory, plugins
        self.model = tiny_qwen3(directory / "model", seed=3)
        self._overrides = [f"model.path={self.model}", *overrides]
        self.temporary = Path(tempfile.mkdtemp(prefix="sc-"))  # short: sockets are put below it

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.temporary)

    @property
    def root(self):
        """The root of the run's store."""
        return self.directory / "store"

    @property
    def store(self):
        return open_store(self.root)

    @property
    def receipts(self):
        """What was killed, in order."""
        return self.lines("receipt")

    @property
    def outcome(self):
        """What the process that came to the end of the run wrote."""
        return dict(json.loads((self.directory / "outcome.json").read_text()))

    @property
    def log(self):
        """The end of what the processes printed."""
        return (self.directory / "flow.log").read_text()[-8000:]

    def lines(self, name):
        """Return the values of a file of JSON lines."""
        return [json.loads(line) for line in (self.directory / f"{name}.jsonl").read_text().splitlines()]

    def begin(self, kills, **variables):
        """Begin, or go on with, the run in a new process."""
        request = {"overrides": self._overrides, "kills": dict(kills)}
        command = [sys.executable, "-P", "-m", "tests.acceptance.program", str(self.directory), json.dumps(request)]
        paths = {"PYTHONPATH": f"{PLUGINS}:{ROOT}"} if self._plugins else {}
        variables = {**os.environ, **VARIABLES, **paths, "TMPDIR": str(self.temporary), **variables}
        with (self.directory / "flow.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log)

    def live(self, kills, status=0, **variables):
        """Let a process work on the run until it ends, with that status."""
        assert self.begin(kills, **variables).wait() == status, self.log
