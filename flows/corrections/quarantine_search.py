"""Finding the rollouts that a condition in SQL describes, among those that the ledger names."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import duckdb
import polars as pl

from storage.schemas.stage_tables import TRACES
from storage.store import Store

COLUMNS = tuple(TRACES.stored.names)
"""What a condition may speak of: the columns of traces, with run, step, key, attempt and seq."""


class NoSuchRollouts(ValueError):
    """A condition describes no rollout, or is none."""


@dataclass(frozen=True)
class Found:
    """The rollouts that a condition describes."""

    trace_ids: tuple[str, ...]
    """Sorted."""
    looked_at: int
    """Rollouts that the condition was asked about."""


def search(store: Store, where: str, run: str = "") -> Found:
    """Return the rollouts with a row in traces for which `where` holds; of one run, if it is named.

    A rollout that was graded again has a row for each grading; one is enough. Only the columns that the condition
    mentions are read. Raises RunUnknown, and NoSuchRollouts where the condition is none or holds for nothing.
    """
    rows = store.scan("traces")
    if run:
        store.runs.events(run)
        rows = rows.filter(pl.col("attempt").is_in(_attempts(store, run)))
    read = rows.select({"trace_id", *_mentioned(where)}).collect()
    found = _holds(read, where)
    looked_at = read["trace_id"].n_unique()
    if not found:
        place = f"run {run!r}" if run else "any run"
        raise _refusal(f"no rollout of {place} fits: {where!r} holds for none of {looked_at}.")
    return Found(tuple(sorted(found)), looked_at)


def _attempts(store: Store, run: str) -> list[str]:
    """Return what names the rows that a run uses: those that others computed and it shares are among them."""
    return sorted({piece.attempt for entry in store.ledger.entries(run=run) for piece in entry.slices("traces")})


def _mentioned(where: str) -> Iterable[str]:
    words = {word.lower() for word in re.findall(r"\w+", where)}
    return (name for name in COLUMNS if name.lower() in words)


def _holds(traces: pl.DataFrame, where: str) -> set[str]:
    """Return the ids for which the condition holds; the border at which SQL's errors become ours."""
    query = f"SELECT DISTINCT trace_id FROM traces WHERE (\n{where}\n)"  # a comment in it ends with its line
    with duckdb.connect(config={"enable_external_access": "false"}) as connection:
        connection.register("traces", traces.to_arrow())
        try:
            if len(connection.extract_statements(query)) != 1:
                raise _refusal(f"--where takes one condition, not {where!r}")
            return {row[0] for row in connection.execute(query).fetchall()}
        except duckdb.Error as error:
            said = str(error).splitlines()[0]
            raise _refusal(f"--where {where!r} is no condition on traces: {said}") from error


def _refusal(what: str) -> NoSuchRollouts:
    return NoSuchRollouts(
        f"{what}\nNothing was recorded. The columns of traces are: {', '.join(COLUMNS)}.\n"
        "Say for example --where \"environment = 'x' and reward > 0.9\", or of what is in JSON "
        "--where \"json_extract(metrics, '$.exact') = 1\"."
    )
