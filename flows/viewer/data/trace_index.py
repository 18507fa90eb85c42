"""The index of traces: what finds one by its id or its example, read once for each piece of work."""

from collections.abc import Iterable

import polars as pl

from flows.queries.store_reader import Library, each_once
from storage.read.lineage import Work

INDEX = (
    "key",
    "trace_id",
    "step",
    "environment",
    "example_id",
    "agent",
    "group_id",
    "reward",
    "error_class",
    "policy_version",
)


def index(library: Library, works: Iterable[Work]) -> pl.DataFrame:
    """Return one row for each trace that some works made, columns as in `INDEX`, work by work."""
    named = {work.identity: work for work in works}
    unread = library.frames().rows([], "traces").select(INDEX).collect()

    def read(names: list[tuple[str, ...]]) -> dict[tuple[str, ...], pl.DataFrame]:
        missing = [named[name] for name in names]
        rows = library.frames().rows(missing, "traces").select(*INDEX, "seq").collect().sort("seq").drop("seq")
        parts = rows.partition_by("key", as_dict=True)
        return {name: parts.get((named[name].key,), unread) for name in names}

    return pl.concat([unread, *each_once(library, "trace index", list(named), read).values()])
