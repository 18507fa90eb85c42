"""Processes of ours start in a directory with files named as our packages, and find a person's modules there."""

import os
import subprocess
import sys

import pytest

from configs.environments import EnvironmentConfig
from configs.services import LearnerConfig
from tasks.inference.environments import servers
from tasks.learner import client
from tasks.runtime import process_variables
from tasks.runtime.process_variables import inherited_variables
from tests.fixtures.installed import hostile_directory, variables


@pytest.fixture
def directory(tmp_path):
    """A person's directory, with files named as our packages."""
    return hostile_directory(tmp_path)


def said_in(directory, command):
    """Run a command in a directory, without a word on where modules are."""
    return subprocess.run(
        command, cwd=directory, env=variables(), capture_output=True, text=True, timeout=100, check=False
    )


def test_packages_are_ours_where_the_working_directory_has_their_names(directory):
    done = said_in(directory, process_variables.module_command("tasks.runtime.process_variables"))
    assert (done.returncode, done.stderr) == (0, "")
    # By `python -m` alone the person's own `tasks.py` is what it finds.
    assert "stands in" in said_in(directory, [sys.executable, "-m", "tasks.runtime.process_variables"]).stderr


def test_children_of_ours_are_started_so(tmp_path):
    environment = EnvironmentConfig(name="e", taskset={"id": "sample_reverse_text"})
    started = [
        client.command(LearnerConfig(), "report")[0],
        client.command(LearnerConfig(processes=2), "report")[0],
        servers.command(environment, tmp_path / "report", "--grade")[0],
    ]
    for command in started:
        assert command[:3] == [sys.executable, "-P", "-m"]
    assert (
        started[1][3] == "tasks.learner.launcher"
        and client.command(LearnerConfig(processes=2), "report")[1]["PYTHONSAFEPATH"]
    )


@pytest.mark.engine
@pytest.mark.parametrize("module", ["tasks.learner.worker", "tasks.inference.environments.host"])
def test_services_load_from_such_a_directory(module, directory):
    done = said_in(directory, process_variables.module_command(module, "--help"))
    assert done.returncode == 0 and "--report" in done.stdout, done.stderr


def test_what_a_worker_sets_for_a_flow_run_goes_no_further(monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert "PYTHONSAFEPATH" not in inherited_variables() and "PATH" in os.environ.keys() & inherited_variables().keys()
