"""The soak forks what the program would execute: it must know the commands of the program's services."""

import pytest

from configs.services import LearnerConfig
from tasks.learner.client import command
from tests.faults.forking import module_of


def test_the_learner_s_command_is_known():
    assert module_of(command(LearnerConfig(), "report.json")[0]) == ["tasks.learner.worker", "--report", "report.json"]


def test_another_program_is_not_forked():
    with pytest.raises(AssertionError):
        module_of(["python", "-m", "tasks.learner.worker"])
