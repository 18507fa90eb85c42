"""Watch: the live panel of a run that somebody else started, read from the store; its rollouts on the same terminal."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from flows.cli.arguments import Plain, StoreOption, option

LOOK_SECONDS = 2.0
"""From one look at the store to the next."""
READ = "r"
"""The key that opens the reader of rollouts."""


def watch(
    run: Annotated[str, option("a run, `latest` for the newest", "RUN")] = "latest",
    /,
    *,
    read: Annotated[bool, option("read the rollouts of its last step at once")] = False,
    store: StoreOption = "",
    plain: Plain = False,
) -> int | None:
    """Follow any run in the live panel, and read its rollouts."""
    from configs.store import default_store
    from flows.queries.store_reader import StoreReader, recorded_run
    from flows.viewer.terminal.reader import read_rollouts

    library = StoreReader.at(store or default_store())
    name, _ = recorded_run(library.store, run)
    if read:
        return read_rollouts(library, name)
    while follow(library, name, plain, wait_for_key):
        read_rollouts(library, name)
    return 0


def follow(library: Any, run: str, plain: bool, wait: Callable[[float], str]) -> bool:
    """Show a run until it ends, then print its result; return True, at once, where somebody wants to read rollouts.

    `wait` sleeps so many seconds, or until a key is pressed, and returns the key.
    """
    from flows.cli.launch import panel_for
    from flows.queries.run_state import deciding_event, is_going, state_of
    from flows.queries.store_reader import recorded_run
    from flows.queries.watched import Watched
    from flows.reporting.panel import is_terminal, printable

    config = recorded_run(library.store, run)[1]
    keys = is_terminal(sys.stdout) and sys.stdin.isatty() and not plain
    watched = Watched(library, run, config)
    with panel_for(config, plain) as panel, _pressed_keys(keys):
        if keys:
            panel.note(f"{READ}: read the rollouts; Ctrl-C: leave, the run goes on")
        while True:
            going = is_going(deciding_event(library.store.runs.events(run)))
            watched.show(panel)
            if not going:
                break
            if wait(LOOK_SECONDS) == READ and keys:
                return True
    last = state_of(deciding_event(library.store.runs.events(run)))
    print(": ".join(filter(None, (f"run {run}", last["state"], printable(last["message"])))))
    for line in watched.summary():
        print(line)
    return False


def wait_for_key(seconds: float) -> str:
    """Sleep, or until a key is pressed; return the key, or nothing. Off a terminal it only sleeps."""
    import select

    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    # From the descriptor: Python's own buffer would take more keys, and `select` would not see them.
    return (
        os.read(sys.stdin.fileno(), 1).decode(errors="replace")
        if select.select([sys.stdin], [], [], seconds)[0]
        else ""
    )


@contextmanager
def _pressed_keys(wanted: bool) -> Iterator[None]:
    """Within the block, let each key be read as it is pressed, without a line's end and without being shown."""
    if not wanted:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
