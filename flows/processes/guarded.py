"""Starting a program behind a guardian that ends it, with all that it started, as soon as its lifeline is let go."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.processes import guardian
from flows.processes.lifeline import Lifeline


def guarded(
    argv: Sequence[str], variables: Mapping[str, str], log: Path, heading: str, grace_seconds: float
) -> tuple["subprocess.Popen[bytes]", Lifeline]:
    """Start a program; return its guardian, and the lifeline whose end is its own. Output is appended to `log`.

    `heading` is written to the log first, `variables` are added to the environment, and `grace_seconds` pass between
    the polite signal and the other one. Raises OSError where the system refuses: a full disk, no process left.
    """
    lifeline = Lifeline()
    command = [sys.executable, "-I", "-S", guardian.__file__, str(lifeline.read), str(grace_seconds)]
    try:
        with log.open("ab") as output:
            output.write(f"{heading}\n".encode())
            output.flush()
            process = subprocess.Popen(
                [*command, *argv],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[lifeline.read],
                start_new_session=True,
            )
    except OSError:
        lifeline.close()
        raise
    finally:
        os.close(lifeline.read)
    return process, lifeline
