"""The command line: reads arguments and calls what does the work; nothing heavy is imported before that.

The one border where errors meant for people become one message: exit status 2 for those, 130 for an interrupt.
"""

import argparse
import os
import select
import sys
import warnings
from collections.abc import Sequence

from flows.commands import (
    asking,
    comparing,
    deploying,
    exchanging,
    keeping,
    looking,
    marking,
    replaying,
    running,
    viewing,
)
from flows.commands.arguments import settle
from flows.viewer.texts import visible

UNREAD = 141
"""The exit status where who read the output closed it, as a shell tells of a program that SIGPIPE ended."""
OURS = ("configs", "storage", "tasks", "flows")
GROUPS = (running, replaying, looking, viewing, asking, marking, keeping, deploying, comparing, exchanging)
"""Files of commands, in the order of the help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 not ready, 2 a mistake that the message explains.

    UNREAD where nobody reads what it prints any more, as after `| head`.
    """
    if sys.stdout is None:  # closed by who started this, as by `>&-`: `print` says nothing then, all else fails
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    arguments = parse(sys.argv[1:] if argv is None else argv)
    warnings.formatwarning = lambda message, *_, **__: f"stagecoach: {visible(str(message))}\n"
    try:
        status = arguments.command(arguments) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return UNREAD
    except KeyboardInterrupt:
        print("\nInterrupted. What is committed is safe; `stagecoach resume` goes on from there.", file=sys.stderr)
        return 130
    except Exception as error:
        message = explanation(error)
        if message is None:
            raise
        print(f"stagecoach: {visible(message)}", file=sys.stderr)
        return 2


def _nobody_reads() -> bool:
    """Say whether standard output is what was closed; what was still to be said goes nowhere then."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, ValueError, OSError):  # there is none, or it is no file
        return False
    ends = select.poll()
    ends.register(output, 0)
    if not any(told & (select.POLLERR | select.POLLHUP) for _, told in ends.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


def explanation(error: BaseException) -> str | None:
    """Return what to tell a person about `error`, or None where only a traceback would explain it."""
    if "No space left on device" in str(error):
        return f"the disk is full: {error}. What is committed is safe: make room, then `stagecoach resume`."
    if type(error).__module__.partition(".")[0] not in OURS:
        return None
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of one command. Exits with status 2 on a usage error."""
    parser = argparse.ArgumentParser(
        prog="stagecoach",
        description="Post-training of language models with reinforcement learning, as a pipeline of durable stages.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for group in GROUPS:
        group.add(commands)
    return settle(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
