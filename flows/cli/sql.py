"""SQL over a store: one question, answered as a table, JSON, CSV or a Parquet file; nothing can be changed."""

import json
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from configs.run import RunConfig
from flows.queries.outcomes import DERIVED
from flows.reporting.formats import console, grid, visible
from storage.errors import border
from storage.read.frames import Frames, existing_store
from storage.read.sql import QuestionError, ask, columns_of

MOST_ROWS = 100
"""Rows that are printed as a table."""
SAFE = "the store was only read"
ENDINGS = {".json": "json", ".csv": "csv", ".parquet": "parquet"}


def main(query: str, form: str = "", output: str = "", tokens: bool = False, store: str = "", run: str = "") -> int:
    """Answer a question, or list the tables where there is none; return the exit status.

    Raises QuestionError with the database's message, RunUnknown, and LayoutError where there is no store.
    """
    frames = Frames(existing_store(store or RunConfig().store), DERIVED)
    frames = frames.run(run) if run else frames
    if not query:
        print("\n".join(f"{name}: {', '.join(columns_of(frames, name, tokens))}" for name in frames.names))
        return 0
    form = _form(form, output)
    with border("reading the tables", frames.store.root.address):
        answer = ask(frames, query, tokens)
    if output:
        write(answer, form, Path(output))
        print(f"{answer.num_rows} rows in {output}")
    else:
        show(answer, form)
    return 0


def _form(form: str, output: str) -> str:
    """Return the format asked for, or that of the file's ending."""
    form = form or ENDINGS.get(Path(output).suffix, "" if output else "table")
    if form == "parquet" and not output:
        raise QuestionError("Parquet is not for the terminal", "", SAFE, "name a file with --output FILE")
    if output and form in ("", "table"):
        endings = ", ".join(ENDINGS)
        raise QuestionError("in which format?", output, SAFE, f"let the file end in {endings}, or give --format")
    return form


def write(answer: pa.Table, form: str, path: Path) -> None:
    """Write an answer to a new file or over an old one. Raises QuestionError where that cannot be done."""
    try:
        if form == "parquet":
            pq.write_table(answer, path)
        elif form == "csv":
            pacsv.write_csv(_without_lists(answer), path)
        else:
            path.write_text(as_json(answer))
    except OSError as error:
        raise QuestionError(
            f"the answer cannot be written: {error}", str(path), "the store", "name another file"
        ) from error


def show(answer: pa.Table, form: str) -> None:
    """Print an answer."""
    if form == "json":
        print(as_json(answer))
    elif form == "csv":
        sink = pa.BufferOutputStream()
        pacsv.write_csv(_without_lists(answer), sink)
        text = sink.getvalue().to_pybytes().decode()
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)  # a program gets it exactly
    else:
        _print(answer)


def as_json(answer: pa.Table) -> str:
    """Return an answer as a JSON array of objects; times are ISO 8601."""
    return json.dumps(answer.to_pylist(), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else str(value)


def _without_lists(answer: pa.Table) -> pa.Table:
    """Write lists and structs as JSON text: CSV has no word for them."""
    for place, field in enumerate(answer.schema):
        if pa.types.is_nested(field.type):
            texts = [
                None if value is None else json.dumps(value, default=_plain) for value in answer[place].to_pylist()
            ]
            answer = answer.set_column(place, field.name, pa.array(texts, pa.string()))
    return answer


def _print(answer: pa.Table) -> None:
    types = [field.type for field in answer.schema]
    left = [n for n, each in enumerate(types) if not (pa.types.is_integer(each) or pa.types.is_floating(each))]
    rows = answer.slice(0, MOST_ROWS).to_pylist()
    out = console()
    out.print(grid(answer.column_names, (map(_cell, row.values()) for row in rows), left))
    if answer.num_rows > MOST_ROWS:
        out.print(f"... and {answer.num_rows - MOST_ROWS} more rows: --format csv or --output FILE has all")


def _cell(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
