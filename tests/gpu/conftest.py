"""The settings of `stagecoach gpu-smoke` and `lora-smoke`, and the report of each check to the command.

The command passes files, overrides, the tokens of a row, whether to be quick, the descriptor of its output and whether
to write JSON to it, as JSON in STAGECOACH_SMOKE.
Without it the tests use the demo's settings and report to nobody.
"""

import json
import os
from pathlib import Path

import pytest

from configs.load import load
from tasks.learner.client import ENVIRONMENT
from tasks.runtime.process_variables import inherited_variables

SETTINGS = {"files": ["demo"], "overrides": [], "tokens": 4096, "quick": False, "report": None, "json": True}
SETTINGS |= json.loads(os.environ.get("STAGECOACH_SMOKE", "{}"))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def variables():
    """Return the variables of a process that runs a module of `tests` as the learner's."""
    return inherited_variables() | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def smoke():
    """Return the settings of the command: files, overrides, tokens, quick."""
    return SETTINGS


@pytest.fixture(scope="session")
def config():
    """Return the config of the command's files and overrides."""
    return load(SETTINGS["files"], SETTINGS["overrides"])


@pytest.fixture
def check():
    """Yield a function that reports a check; a wrong one fails the test when all of its checks are reported."""
    wrong = []

    def report(name, measured, expected, passed):
        _report({"name": name, "measured": measured, "expected": expected, "passed": passed})
        if passed is False:
            wrong.append(f"{name}: {measured}, expected {expected}")

    yield report
    assert not wrong, "; ".join(wrong)


def pytest_runtest_logreport(report):
    """Report a test that raised as a check that is wrong."""
    if report.failed and report.when != "teardown":
        message = report.longreprtext.splitlines()[-1]
        crash = getattr(report.longrepr, "reprcrash", None)
        measured = crash.message.splitlines()[0] if crash else message
        _report({"name": report.location[2], "measured": measured, "expected": "no failure", "passed": False})


def _report(line):
    if SETTINGS["report"] is not None:
        verdict = {True: "OK", False: "WRONG", None: ""}[line["passed"]]
        text = f"{verdict:6} {line['name']:42} {line['measured']:30} {line['expected']}".rstrip()
        os.write(SETTINGS["report"], f"{json.dumps(line) if SETTINGS['json'] else text}\n".encode())
