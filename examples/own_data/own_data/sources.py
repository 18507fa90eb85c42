"""Where rows come from: local files, or a dataset of the hub. Each row comes with the name of its place."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

from own_data.errors import DataUnusable

Row = dict[str, Any]


def from_files(path: str) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file, or of those of a pattern by name, each with its place: `FILE, line 3` or `FILE, row 2`.

    Lines count from 1, those of a table with its header, and a row of several lines has the number of its last; rows of
    Parquet and items of lists in JSON count from 0. Raises DataUnusable where a file is missing, of another kind or
    damaged, naming the line.
    """
    place = Path(path).expanduser()
    files = [place] if place.is_file() else sorted(filter(Path.is_file, map(Path, glob(str(place), recursive=True))))
    if not files:
        raise DataUnusable(f"path {path}: there is no such file; relative paths start at {Path.cwd()}")
    for file in files:
        suffix = Path(file.name.lower().removesuffix(".gz")).suffix
        if suffix not in READERS:
            raise DataUnusable(f"path {file}: want a file that ends in {', '.join(READERS)}; texts also in .gz")
        for where, row in READERS[suffix](file):
            if not isinstance(row, dict):
                raise DataUnusable(f"{where}: a JSON object is wanted, this is {type(row).__name__}")
            yield where, row


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text, each with its place, without the mark that some editors put first."""
    number = 0
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{file}, line {number}", line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataUnusable(f"{file}, line {number}: cannot be read as text in UTF-8: {error}") from error


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the objects of lines, or those of a list, which is read at once."""
    lines = _lines(file)
    for place, line in lines:
        text = line.strip()
        if text.startswith("["):
            text += "".join(rest for _, rest in lines)
        try:
            value = json.loads(text or "[]")
        except (ValueError, RecursionError) as error:
            raise DataUnusable(f"{place}: not JSON: {error}. One JSON object in each line is wanted") from error
        if isinstance(value, list):
            yield from ((f"{place}, item {number}", row) for number, row in enumerate(value))
        else:
            yield place, value


def _table(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows below a header, all values as texts: 007 stays what it is."""
    csv.field_size_limit(2**31 - 1)  # Python's own limit is 131,072 characters
    lines = (line for _, line in _lines(file))
    header = next(lines, "")
    rows = csv.reader(chain([header], lines), delimiter=max(",;\t", key=header.count), strict=True)
    try:
        names = next(rows, [])
        for values in filter(None, rows):
            place = f"{file}, line {rows.line_num}"
            if len(values) != len({*names}):
                raise DataUnusable(f"{place}: {len(values)} values, and the header names {', '.join(names)}")
            yield place, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DataUnusable(f"{file}, line {rows.line_num}: {error}") from error


def _parquet(file: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        batches = ParquetFile(file).iter_batches()
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"{file}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise DataUnusable(f"{file}: cannot be read as Parquet: {error}") from error


READERS = {".jsonl": _json, ".json": _json, ".csv": _table, ".tsv": _table, ".parquet": _parquet}
"""What reads a file, by the end of its name."""


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
