"""The learner as a process of its own, the batches that it is given, and modules that several ranks run."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import psutil

from configs.services import LearnerConfig
from tasks.learner.client import command
from tests.fixtures.learner_steps import train_step
from tests.fixtures.packed import batches, sample
from tests.fixtures.waiting import PATIENCE, until


@contextmanager
def process(directory, processes=1, stdin=subprocess.PIPE, **settings):
    """Run the learner's process; on the way out it must be gone, whatever was done to it."""
    directory.mkdir(parents=True, exist_ok=True)
    report = directory / "report.json"
    argv, environment = command(LearnerConfig(processes=processes, **settings), str(report))
    with (directory / "log").open("w") as log:
        child = subprocess.Popen(argv, env={**os.environ, **environment}, stdin=stdin, stdout=log, stderr=log)
    try:
        until(lambda: report.exists() or child.poll() is not None, (directory / "log").read_text)
        assert report.exists(), (directory / "log").read_text()
        yield child, json.loads(report.read_text())
    finally:
        tree = [child, *psutil.Process(child.pid).children(recursive=True)] if child.poll() is None else [child]
        for each in tree:
            each.kill()
        child.wait(PATIENCE)
        if child.stdin:
            child.stdin.close()


def train(learner, step, directory, save_optimizer=False):
    """Train on three rows of one sample; return the row of the step's one update, and the statistics.

    Where two ranks share the rows, one has nothing to do in the second micro-step.
    """
    table = batches([[sample(f"{step}{name}", 12 + 3 * i, 10 * step + i)] for i, name in enumerate("abc")])
    (update,), statistics = train_step(learner, step, directory, table, save_optimizer)
    return update, statistics


def run_ranks(number, module, *arguments):
    """Run a module in so many processes that torchrun starts; all must end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    done = subprocess.run(
        [*command, "-m", module, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
