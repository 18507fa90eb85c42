"""The command watch: the live panel of a run that another process started, read from the store."""

import time

from flows.cli.arguments import Plain, RunOrLatest, StoreOption, stored_run

LOOK_SECONDS = 2.0
"""Time between two readings of the store."""


def watch(run: RunOrLatest = "latest", /, *, store: StoreOption = "", plain: Plain = False) -> int:
    """Show a run until it ends, then print its result. Raises ConfigError for an unknown run, LayoutError."""
    from flows.cli.launch import panel_for
    from flows.queries.run_state import deciding_event, is_going, state_of
    from flows.queries.store_reader import StoreReader
    from flows.queries.watched import Watched
    from flows.reporting.panel import printable

    reader, name, config = stored_run(store, run)
    watched = Watched(StoreReader(reader.store), name, config)  # holds within a bound: a run may take days
    with panel_for(config, plain) as panel:
        while True:
            last = deciding_event(reader.store.runs.events(name))
            watched.show(panel)
            if not is_going(last):
                break
            time.sleep(LOOK_SECONDS)
    state = state_of(last)
    print(": ".join(filter(None, (f"run {name}", state["state"], printable(state["message"])))))
    for line in watched.summary():
        print(line)
    return 0
