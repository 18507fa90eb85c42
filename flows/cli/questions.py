"""Commands about rows: lineage (where a row comes from, what was made from it), why (the outcome of a rollout)."""

import json
from typing import Annotated

from flows.cli.arguments import Json, OfRun, StoreOption, open_reader, option
from flows.reporting.formats import one_line, say

MAX_VALUE_CHARS = 1000
"""Characters of a value that are printed; JSON has all."""
MAX_NAME_CHARS = 100
"""Characters of its name: rewards are named by environments."""


def lineage(
    id: Annotated[str, option("see below", "ID")],
    /,
    *,
    up: Annotated[bool, option("only where it comes from")] = False,
    down: Annotated[bool, option("only what was made from it")] = False,
    kind: Annotated[str, option("the kind of ID, if it can mean several things")] = "",
    run: OfRun = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the lineage of an id. Raises UnknownId, RunUnknown, LayoutError without a store."""
    from flows.cli.lineage_tree import as_values, lines, trace_lineage
    from storage.read.damage import reading
    from storage.read.frames import Frames

    frames = Frames(open_reader(store).store)
    # Neither or both options ask for both directions.
    directions = [name for name, asked in (("up", up or not down), ("down", down or not up)) if asked]
    with reading(frames.store):
        found = trace_lineage(frames.run(run) if run else frames, id, directions, kind)
    if as_json:
        print(json.dumps(as_values(found)))
    else:
        for line in lines(found):
            say(line)
    return 0


def why(
    trace: Annotated[str, option("a rollout; its id may be cut to eight characters", "TRACE")],
    /,
    *,
    run: OfRun = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the outcome of a rollout in every run that uses it. Raises UnknownId, RunUnknown, LayoutError."""
    from flows.cli.output import cell
    from flows.queries.store_reader import flat
    from flows.queries.trace import explain
    from storage.read.damage import reading

    reader = open_reader(store)
    with reading(reader.store):
        found = explain(reader, trace, run)
    if as_json:
        print(json.dumps(found, default=str))
        return 0
    for part in (found["trace"], *found["runs"], *found["quarantines"]):
        for name, value in flat(part):
            if value != "":
                say(one_line(f"{one_line(name, MAX_NAME_CHARS)}: {cell(name, value)}", MAX_VALUE_CHARS))
        print()
    return 0
