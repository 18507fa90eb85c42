"""The process of an environment: SIGTERM in the middle of a weak reference's callback."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PROGRAM = """
import asyncio, os, signal, sys, weakref
from tasks.inference.environments.host import cancel_on_sigterm

class Thing: ...

async def main():
    thing = Thing()
    reference = weakref.ref(thing, lambda _: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(3)])
    try:
        del thing
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        {then}

cancel_on_sigterm()
asyncio.run(main())
print("ended", flush=True)
"""

EARLY = """
import os, signal, time, weakref
from tasks.inference.environments.host import cancel_on_sigterm

class Thing: ...

cancel_on_sigterm()
thing = Thing()
reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
del thing
print("importing", flush=True)
while True:
    time.sleep(0.1)
"""


def run(then: str) -> "subprocess.CompletedProcess[str]":
    return run_program(PROGRAM.replace("{then}", then))


def run_program(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_signal_inside_a_callback_cancels_what_the_loop_runs() -> None:
    done = run(then="pass")
    assert (done.stdout.split(), done.returncode) == (["cancelled", "ended"], 0)
    assert "Exception ignored" not in done.stderr


def test_a_server_that_passes_the_cancellation_on_ends_as_interrupted() -> None:
    done = run(then="raise")
    assert done.stdout.split() == ["cancelled"]
    assert "KeyboardInterrupt" in done.stderr


def test_a_signal_that_was_lost_before_the_loop_runs_is_not_lost_for_good() -> None:
    done = run_program(EARLY)
    assert done.stdout.split() == ["importing"], "it was lost at first"
    assert "Exception ignored" not in done.stderr and done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.returncode == -signal.SIGINT
