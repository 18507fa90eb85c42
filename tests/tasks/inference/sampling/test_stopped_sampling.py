"""A process that is stopped while it samples, as by Ctrl-Z, for longer than a rollout may take, loses no rollout."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from configs.environments import EnvironmentConfig
from tasks.inference.environments import servers as environments
from tests.fixtures.driving import ROOT
from tests.fixtures.faults import happened
from tests.fixtures.hosts import config_of, examples_of, served
from tests.fixtures.waiting import PATIENCE, until

pytestmark = pytest.mark.engine
LIMIT, STOPPED = 8.0, 12.0
"""Seconds: of a rollout, which takes three, and of the stop in the middle of it."""


@pytest.mark.fault("signal", "a process that samples is stopped for longer than a rollout may take", "no timeout")
@pytest.mark.usefixtures("plugins")
def test_rollouts_of_a_stopped_process_are_no_timeouts(small_engine, models, tmp_path):
    taskset = {"id": "misbehaving_taskset", "faults": ["lingers"], "task": {"directory": str(tmp_path)}}
    environment = EnvironmentConfig(name="bad", taskset=taskset)
    environments.write_rows(tmp_path / "examples.arrow", examples_of(environment))
    config = config_of(models["a"], environment, max_tokens=6, timeout_seconds=LIMIT)
    with served(environment, tmp_path) as told:
        request = {
            "examples": str(tmp_path / "examples.arrow"),
            "config": config.model_dump(mode="json"),
            "engine": small_engine.url,
            **told,
        }
        sampling = subprocess.Popen(
            [sys.executable, "-m", "tests.fixtures.sampling_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        try:
            assert sampling.stdin
            sampling.stdin.write(json.dumps(request))
            sampling.stdin.close()
            sampling.stdin = None
            until((tmp_path / "lingers.once").exists, lambda: "no rollout was scored")
            os.kill(sampling.pid, signal.SIGSTOP)
            happened(f"SIGSTOP to {sampling.pid} for {STOPPED} s")
            time.sleep(STOPPED)
            os.kill(sampling.pid, signal.SIGCONT)
            output, _ = sampling.communicate(timeout=PATIENCE)
        finally:
            sampling.kill()
            sampling.wait()
    assert json.loads(output.splitlines()[-1])["ended"] == [None, None]
