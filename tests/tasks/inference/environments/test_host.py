"""The process of an environment: SIGTERM at any moment of its event loop cancels what the loop runs, once."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PROGRAM = """
import asyncio, os, signal, weakref
from tasks.inference.environments.host import cancel_on_sigterm

class Thing: ...

async def main():
    cancel_on_sigterm()
    thing = Thing()
    reference = weakref.ref(thing, lambda _: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(3)])
    try:
        del thing
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        await asyncio.sleep(0.1)  # the end may take its time
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        print("ended", flush=True)

asyncio.run(main())
"""


def test_a_signal_inside_a_callback_cancels_what_the_loop_runs_once():
    """Python drops an exception that is raised in the callback of a weak reference: none is raised."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout.split(), done.returncode, done.stderr) == (["cancelled", "ended"], 0, "")
