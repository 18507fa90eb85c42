"""Where rows come from: a local file, or a dataset of the hub. Each row comes with the name of its place."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from own_data.errors import DataUnusable

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".parquet")


def from_file(path: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a JSONL or Parquet file, each with its place for messages: `FILE, line 3` or `FILE, row 2`.

    Lines count from 1, empty ones are passed over, and so is the mark that some editors put first; rows of Parquet
    count from 0. Raises DataUnusable where the file is missing, of another kind or damaged, naming the line.
    """
    file = Path(path).expanduser()
    if file.suffix not in SUFFIXES:
        raise DataUnusable(f"path {path}: want a file that ends in {' or '.join(SUFFIXES)}")
    if not file.is_file():
        raise DataUnusable(f"path {path}: there is no such file; relative paths start at {Path.cwd()}")
    yield from _parquet(file) if file.suffix == ".parquet" else _json_lines(file)


def _json_lines(file: Path) -> Iterator[tuple[str, Row]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataUnusable(f"{place}: not JSON: {error}. One JSON object in each line is wanted") from error
            if not isinstance(row, dict):
                raise DataUnusable(f"{place}: a JSON object is wanted, this is {type(row).__name__}")
            yield place, row


def _parquet(file: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        batches = ParquetFile(file).iter_batches()
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"{file}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise DataUnusable(f"{file}: cannot be read as Parquet: {error}") from error


def from_hub(name: str, subset: str, split: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a split of a dataset of the hub, or of a local directory of data files; rows count from 0.

    What was read once is read from the library's cache, also offline. Raises DataUnusable where `datasets` is not
    installed, or the dataset, subset or split is not to be had.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataUnusable(
            f"hub {name}: reading datasets of the hub needs the package `datasets`, which is not installed here: "
            "pip install datasets. Or save the dataset as a file, and give its `path`"
        ) from error
    try:
        rows = load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:  # what the library raises for names, splits and connections
        raise DataUnusable(f"hub {name}, split {split}: {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows):
        yield f"{name}, split {split}, row {number}", dict(row)
