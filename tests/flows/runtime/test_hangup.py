"""A run whose terminal is closed ends as interrupted, and its events say so."""

import os
import pty
import signal
import sys

import pytest

from storage.store import open_store
from tests.fixtures.driving import ROOT
from tests.fixtures.faults import happened
from tests.fixtures.waiting import until

pytestmark = pytest.mark.engine
PROGRAM = """
import sys
from pathlib import Path
from flows.orchestration.signals import termination_reported
from flows.runtime.session import record_run
from tests.fixtures.rehearsal import session_for
from tests.fixtures.waiting import until_told
session = session_for(Path(sys.argv[1]), "a")
session.watchers = (lambda event, facts: print(event, facts, flush=True),)
with termination_reported(), record_run(session):
    until_told(0.01)
"""


def events(root):
    runs = open_store(root).runs
    return runs.events("a") if runs.last("a") else []


@pytest.mark.fault("signal", "the terminal of a run is closed", "the run is interrupted, and its event says so")
@pytest.mark.parametrize("closed", [True, False], ids=["the terminal is closed", "SIGHUP alone"])
def test_a_run_whose_terminal_is_closed_is_interrupted(root, closed):
    child, terminal = pty.fork()
    if not child:
        os.chdir(ROOT)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM, str(root)])
    until(lambda: events(root), lambda: "the run has not begun")
    if closed:
        os.close(terminal)
    else:
        os.kill(child, signal.SIGHUP)
    happened(f"the terminal of {child} is closed: {closed}")
    _, status = os.waitpid(child, 0)
    if not closed:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 143
    last = events(root)[-1]
    assert last.event == "interrupted" and last.message.startswith("ended by SIGHUP, which a closed terminal sends")
