"""main: reads the arguments of a command, calls the command, and converts errors to messages.

Modules of commands are imported after the handler of Ctrl-C is installed. This is the one border where errors meant for
people become one message: exit status 2 for those, 130 for an interrupt.
"""

import os
import resource
import select
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flows import PACKAGES
from flows.cli.interrupts import INTERRUPTED, Interrupts

UNREAD = 141
"""The exit status if the reader closed the output: that of a program that SIGPIPE ended."""
MIN_ADDRESS_SPACE = 3 * 2**30
"""Bytes; on two cores all commands that read a store work within them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 not ready, 2 a mistake that the message explains.

    UNREAD if the reader has closed the output, as `| head` does. Without `argv` this process is the program, and
    Ctrl-C ends it.
    """
    interrupts = Interrupts()
    if argv is None:
        interrupts.install()
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    finally:
        interrupts.end()


def _main(argv: Sequence[str]) -> int:
    if sys.stdout is None:  # closed by the parent process, as by `>&-`: all but `print` would fail
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    warnings.formatwarning = lambda message, *_, **__: f"{_line(str(message))}\n"
    command: Callable[[], int | None] | None = None
    try:
        command = parse(argv)
        status = command() or 0
        sys.stdout.flush()
        return status
    # Before any other error: a closed standard output is no fault, and there is no reader for a message.
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        return UNREAD
    except KeyboardInterrupt as error:
        # A run that can be resumed adds a note.
        print("\n" + " ".join(["Interrupted.", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return INTERRUPTED
    except (SystemExit, GeneratorExit) as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich, which prints help and tables, would end with 1
            return UNREAD
        raise
    except BaseException as error:  # a panic of a library is no Exception
        return _report(error, getattr(command, "keywords", {}).get("store"))


def _require_address_space() -> None:
    """Refuse a limit at which libraries abort the process instead of raising an error."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if resource.RLIM_INFINITY != limit < MIN_ADDRESS_SPACE:
        from storage.errors import StoreError

        raise StoreError(
            f"the limit of address space is {limit / 2**30:.1f} GiB (ulimit -v): libraries that reserve memory need at "
            f"least {MIN_ADDRESS_SPACE >> 30} GiB, and more on many cores",
            safe="nothing was read or written",
            do="raise it, for example by `ulimit -v unlimited`, or bound memory itself, for example by a cgroup",
        )


def _report(error: BaseException, store: str | None) -> int:
    """Print the explanation of an error and return the exit status. Raises the error if there is no explanation."""
    try:
        message = explanation(error) or _damage_behind(error, store)
    except KeyboardInterrupt:
        text = f"Interrupted while looking for damage. Before that: {type(error).__name__}: {error}"
        print(f"\n{_line(text)}", file=sys.stderr)
        return INTERRUPTED
    if message is None:
        raise
    print(_line(message), file=sys.stderr)
    return 2


def _line(text: str) -> str:
    from flows.reporting.formats import visible

    return f"stagecoach: {visible(text)}"


def _is_output_closed() -> bool:
    """Return whether standard output is the closed pipe; its buffered rest is then discarded."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # missing, not a file (as in a notebook), or closed
        return False
    # The error does not name its pipe, which may be a service's.
    poll = select.poll()
    poll.register(output, 0)
    closed = any(mask & (select.POLLERR | select.POLLHUP) for _, mask in poll.poll(0))
    if closed:  # Python would write its buffer at the end, and complain of the same pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return closed


def explanation(error: BaseException) -> str | None:
    """Return the message to print for `error`, or None if only a traceback explains it."""
    from storage.errors import disk_refusal, memory_refusal

    if memory := memory_refusal(error):
        return str(memory)
    if type(error).__module__.partition(".")[0] in PACKAGES:
        refusal = disk_refusal("a disk refused to be written", error)
        return "\n".join([str(error), *getattr(error, "__notes__", []), *(["", str(refusal)] if refusal else [])])
    cause: BaseException | None = error
    while cause is not None:
        # Arrow, Delta and SQLite each have an error class of their own for a full disk.
        if refusal := disk_refusal(f"{type(cause).__name__}: {cause}", cause):
            return str(refusal)
        cause = cause.__cause__ or cause.__context__
    return None


def _damage_behind(error: BaseException, store: str | None) -> str | None:
    """Return the damaged files of a command's store, if there are any: they can cause nearly any error."""
    from configs.store import default_store
    from storage.errors import LayoutError, StoreError, is_foreign
    from storage.read.damage import damage_behind
    from storage.read.frames import existing_store

    is_of_data = is_foreign(error) or isinstance(error, ValueError | LookupError | TypeError | AttributeError)
    if store is None or not is_of_data:  # reading all files takes long
        return None
    try:
        damage = damage_behind(error, existing_store(store or default_store(), read_only=True))
    except LayoutError:  # there is no store
        return None
    except StoreError as opening:  # explains more than the first error
        return str(opening)
    return str(damage) if damage else None


def parse(argv: Sequence[str]) -> Callable[[], Any]:
    """Return a command with its arguments. Raises UsageError for wrong arguments, StoreError for a limit of memory."""
    if argv and argv[0] in ("--help", "-h"):
        from flows.cli.commands import overview

        return lambda: print(overview())
    _require_address_space()  # before the imports of a command, in which libraries reserve memory
    from cyclopts import CycloptsError, UnusedCliTokensError

    from flows.cli.arguments import UsageError, app, with_runs_in_full

    if not argv:
        raise UsageError("name a command; `stagecoach --help` lists them")
    argv = ["runs", *argv[1:]] if argv[0] == "ls" else argv
    try:
        command, bound, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        program, problem = " ".join(["stagecoach", *(error.command_chain or ())]), _without_far_suggestion(str(error))
        if isinstance(error, UnusedCliTokensError):
            problem = f"{program}: an argument too many: {' '.join(error.unused_tokens or ())}"
        raise UsageError(f"{problem}\n`{program} --help` lists the options.") from error
    if argv[0] != "gc":  # what is deleted is named in full
        with_runs_in_full(bound)
    return partial(command, *bound.args, **bound.kwargs)


def _without_far_suggestion(message: str) -> str:
    """Return a message about an unknown option without a suggestion that is not near it."""
    import re
    from difflib import get_close_matches

    problem, _, suggestion = message.partition(" Did you mean ")
    names = re.findall(r"--([\w-]+)", message)
    near = len(names) != 2 or get_close_matches(names[0], names[1:], 1)
    return message if near or not suggestion else problem
