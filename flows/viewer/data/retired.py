"""Retired rows: what was dropped for its age, so that a page can say so where it has nothing to show."""

from collections.abc import Iterable
from typing import Any

from flows.queries.store_reader import Library
from storage.read.lineage import Work


def retired(library: Library, works: Iterable[Work | None]) -> list[dict[str, Any]]:
    """Return what some work has lost, by table: table, num_rows, `at` (the last time) and hours (its retention then).

    Numbers that come from those tables are of the rows that are left.
    """
    once = {work.key: work for work in works if work is not None}
    pieces = [piece for work in once.values() for piece in work.slices]
    found: dict[str, dict[str, Any]] = {}
    for each in sorted(library.store.slices.expired_slices.find(pieces), key=lambda each: (each.table, each.at)):
        before = found.get(each.table, {"num_rows": 0})
        told = {"table": each.table, "num_rows": before["num_rows"] + each.rows, "at": each.at, "hours": each.hours}
        found[each.table] = told
    return list(found.values())


def retired_of(library: Library, *runs: str) -> list[dict[str, Any]]:
    """Return the same of all work that some runs use. Raises NotThere for an unknown run."""
    return retired(library, (work for run in runs for work in library.frames(run).graph.works.values()))


def lost(library: Library, works: Iterable[Work], table: str) -> bool:
    """Say whether any rows that some work made of a table were dropped."""
    pieces = [piece for work in works for piece in work.slices_of(table)]
    return bool(library.store.slices.expired_slices.find(pieces))
