"""Files of a table as one Arrow dataset, into which columns and filters are pushed down; on any file system."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from storage.actions import PARTITION, Active
from storage.roots import Root
from storage.tables import StoredTable


def of_attempts(
    root: Root, stored: StoredTable, schema: pa.Schema, wanted: Mapping[str, Collection[str]]
) -> ds.Dataset:
    """The rows of some attempts, given by run; files that hold none of them are not opened."""
    files = holding(stored, wanted)
    found = of_files(root, stored, schema, files)
    if all(each.first_attempt == each.last_attempt for each in files):
        return found
    return found.filter(pc.field("attempt").isin(sorted({each for of_run in wanted.values() for each in of_run})))


def scan_attempts(
    root: Root, stored: StoredTable, schema: pa.Schema, wanted: Mapping[str, Collection[str]]
) -> pl.LazyFrame:
    """The same rows for polars, which opens a file in a quarter of the time that Arrow takes for it.

    That is what reading costs where a run has left a thousand files: see benchmarks/viewing.md.
    """
    options = dict(root.options) or None
    parts = [pl.LazyFrame(pl.DataFrame(schema.empty_table()))]
    by_run: dict[str, list[Active]] = {}
    for file in holding(stored, wanted):
        by_run.setdefault(file.run, []).append(file)
    for run, files in by_run.items():
        places = [root.child(f"{stored.place}/{each.path}") for each in files]
        rows = pl.scan_parquet(places, glob=False, hive_partitioning=False, storage_options=options)
        if any(each.first_attempt != each.last_attempt for each in files):
            rows = rows.filter(pl.col("attempt").is_in(sorted(set(wanted[run]))))
        parts.append(rows.with_columns(pl.lit(run).alias(PARTITION)).select(schema.names))
    return pl.concat(parts[1:] or parts)


def holding(stored: StoredTable, wanted: Mapping[str, Collection[str]]) -> list[Active]:
    """The files of a table, as it is now, that may hold rows of some attempts, given by run."""
    stored.refresh()
    attempts = {run: sorted(of_run) for run, of_run in wanted.items()}
    return [each for each in stored.active() if _may_hold(each, attempts.get(each.run, ()))]


def of_files(root: Root, stored: StoredTable, schema: pa.Schema, files: Iterable[Active]) -> ds.Dataset:
    """All rows of some files, the run out of each file's place."""
    form = ds.ParquetFileFormat()
    fragments = [
        form.make_fragment(
            f"{stored.place}/{each.path}", root.files, partition_expression=pc.field(PARTITION) == each.run
        )
        for each in files
    ]
    return ds.FileSystemDataset(fragments, schema, form, root.files)


def _may_hold(file: Active, attempts: Sequence[str]) -> bool:
    place = bisect_left(attempts, file.first_attempt)
    return place < len(attempts) and attempts[place] <= file.last_attempt
