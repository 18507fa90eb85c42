"""The command line: reads the arguments of a command, which imports its module, and calls the command.

The one border where errors meant for people become one message: exit status 2 for those, 130 for an interrupt.
"""

from flows.cli.interrupts import INTERRUPTED, EndedByInterrupts, Interrupts

with EndedByInterrupts():
    import os
    import resource
    import select
    import sys
    import warnings
    from collections.abc import Callable, Sequence
    from functools import partial
    from typing import Any

    from flows import PACKAGES
    from flows.cli.commands import overview

UNREAD = 141
"""The exit status where who read the output closed it, as a shell tells of a program that SIGPIPE ended."""
MIN_ADDRESS_SPACE = 3 * 2**30
"""Bytes; on two cores all commands that read a store work within them."""
HELP = ("--help", "-h")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 not ready, 2 a mistake that the message explains.

    UNREAD where nobody reads what it prints any more, as after `| head`. Without `argv` it is the program itself, which
    Ctrl-C ends.
    """
    interrupts = Interrupts()
    try:
        return _main(argv, interrupts)
    finally:
        interrupts.end()


def _main(argv: Sequence[str] | None, interrupts: Interrupts) -> int:
    if sys.stdout is None:  # closed by who started this, as by `>&-`: `print` says nothing then, all else fails
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    warnings.formatwarning = lambda message, *_, **__: f"stagecoach: {_visible(str(message))}\n"
    command: Callable[[], int | None] | None = None
    try:
        if argv is None:
            interrupts.take_over()
        command = parse(sys.argv[1:] if argv is None else argv)
        status: int = command() or 0
        sys.stdout.flush()
        return status
    # Before any other error: a closed standard output is no fault, and nobody is there to read a message.
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return UNREAD
    except KeyboardInterrupt as error:
        # What can be resumed says so itself: most commands only look.
        print("\n" + " ".join(["Interrupted.", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return INTERRUPTED
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a library is no Exception
        return _report(error, command)


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


def _report(error: BaseException, command: Callable[[], int | None] | None) -> int:
    """Print what explains the error that is being handled and return the exit status; where nothing does, raise it."""
    try:
        message = explanation(error) or _damage_behind(error, command)
    except KeyboardInterrupt:
        what = f"Interrupted while looking for damage. Before that: {type(error).__name__}: {error}"
        print(f"\nstagecoach: {_visible(what)}", file=sys.stderr)
        return INTERRUPTED
    if message is None:
        raise
    print(_fitting(f"stagecoach: {_visible(message)}"), file=sys.stderr)
    return 2


def _fitting(text: str) -> str:
    """Return a message in lines that a terminal does not cut within words; a file gets it as it is."""
    if not sys.stderr.isatty():
        return text
    import shutil
    import textwrap

    width = max(shutil.get_terminal_size().columns, 20)
    return "\n".join(
        piece
        for line in text.splitlines()
        for piece in textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [""]
    )


def _visible(text: str) -> str:
    from flows.reporting.formats import visible  # with it comes what lays tables out, and most commands say nothing

    return visible(text)


def _nobody_reads() -> bool:
    """Say whether standard output is what was closed; what was still to be said goes nowhere then."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, ValueError, OSError):  # there is none, or it is no file
        return False
    # Asking the descriptor, for the error itself does not say which pipe it is of: a service has pipes, too.
    ends = select.poll()
    ends.register(output, 0)
    if not any(mask & (select.POLLERR | select.POLLHUP) for _, mask in ends.poll(0)):
        return False
    # Or Python would write what is still buffered when it ends, and complain of the same pipe again.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return True


def explanation(error: BaseException) -> str | None:
    """Return what to tell a person about `error`, or None where only a traceback would explain it."""
    from storage.errors import disk_refusal, memory_refusal

    if memory := memory_refusal(error):
        return str(memory)
    cause: BaseException | None = error
    ours = type(error).__module__.partition(".")[0] in PACKAGES
    while cause is not None and not ours:
        # What noticed it may be Arrow, Delta or SQLite, each with an error class of its own.
        if refusal := disk_refusal(f"{type(cause).__name__}: {cause}", cause):
            return str(refusal)
        cause = cause.__cause__ or cause.__context__
    if not ours:
        return None
    lines = [str(error), *getattr(error, "__notes__", [])]
    if refusal := disk_refusal("a disk refused to be written", error):
        lines += ["", str(refusal)]
    return "\n".join(lines)


def _damage_behind(error: BaseException, command: Callable[[], int | None] | None) -> str | None:
    """Return which files of a command's store are damaged, where any are: these can cause nearly any error."""
    store = getattr(command, "keywords", {}).get("store")
    from configs.store import default_store
    from storage.errors import LayoutError, StoreError, is_foreign
    from storage.read.damage import damage_behind
    from storage.read.frames import existing_store

    of_data = is_foreign(error) or isinstance(error, ValueError | LookupError | TypeError | AttributeError)
    if store is None or not of_data:  # to look through all files takes its time
        return None
    found: StoreError | None
    try:
        found = damage_behind(error, existing_store(store or default_store(), read_only=True))
    except LayoutError:  # there is none
        return None
    except StoreError as other:  # it cannot even be opened: that says more than the first error
        found = other
    return str(found) if found else None


def parse(argv: Sequence[str]) -> Callable[[], Any]:
    """Return a command with its arguments. Raises UsageError for wrong arguments, StoreError for a limit of memory."""
    if argv and argv[0] in HELP:
        return lambda: print(overview())
    _require_address_space()  # before the imports of a command, in which libraries reserve memory
    # As late as this: reading arguments takes longer to import than help may take.
    from cyclopts import CycloptsError

    from flows.cli.arguments import UsageError, app

    if not argv:
        raise UsageError("name a command; `stagecoach --help` lists them")
    argv = ["runs", *argv[1:]] if argv[0] == "ls" else argv
    try:
        command, bound, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        program = " ".join(["stagecoach", *(error.command_chain or ())])
        raise UsageError(f"{_without_far_suggestion(str(error))}\n`{program} --help` lists the options.") from error
    run_command = partial(command, *bound.args, **bound.kwargs)
    return partial(_print_help, run_command) if command in (app.help_print, app.version_print) else run_command


def _without_far_suggestion(message: str) -> str:
    """Return a message about an unknown option without the suggestion of another one that only has letters of it."""
    import re
    from difflib import get_close_matches

    wrong, _, suggestion = message.partition(" Did you mean ")
    names = re.findall(r"--([\w-]+)", message)
    near = len(names) != 2 or get_close_matches(names[0], names[1:], 1)
    return message if near or not suggestion else wrong


def _print_help(write: Callable[[], None]) -> None:
    """Print what `write` writes to the application's console, which itself ends the program where nobody reads."""
    from flows.cli.arguments import app

    # rich ends the process with a status of its own where the pipe is closed; `print` raises what `main` catches.
    with app.console.capture() as captured:
        write()
    print(captured.get(), end="")
