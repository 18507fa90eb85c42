"""The command watch: the live panel of a run that another process started, read from the store."""

import time
from typing import Annotated

from configs.store import default_store
from flows.cli.arguments import Plain, StoreOption, option
from flows.cli.launch import panel_for
from flows.queries.run_state import deciding_event, is_going, state_of
from flows.queries.store_reader import StoreReader, recorded_run
from flows.queries.watched import Watched
from flows.reporting.panel import printable

LOOK_SECONDS = 2.0
"""Time between two readings of the store."""


def watch(
    run: Annotated[str, option("a run, `latest` for the newest", "RUN")] = "latest",
    /,
    *,
    store: StoreOption = "",
    plain: Plain = False,
) -> int:
    """Show a run until it ends, then print its result. Raises ConfigError for an unknown run, LayoutError."""
    reader = StoreReader.at(store or default_store())
    name, config = recorded_run(reader.store, run)
    watched = Watched(reader, name, config)
    with panel_for(config, plain) as panel:
        while True:
            is_live = is_going(deciding_event(reader.store.runs.events(name)))
            watched.show(panel)
            if not is_live:
                break
            time.sleep(LOOK_SECONDS)
    last = state_of(deciding_event(reader.store.runs.events(name)))
    print(": ".join(filter(None, (f"run {name}", last["state"], printable(last["message"])))))
    for line in watched.summary():
        print(line)
    return 0
