"""The answer to a query: printed or written, with a hint if it takes long."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from threading import Timer
from typing import Any

import pyarrow as pa

from flows.reporting.formats import console, grid, visible
from storage.read.query_limits import Bounds
from storage.read.sql import QuestionError

PATIENCE_SECONDS = 2.0
"""After so long a hint says that a question can be ended."""
MOST_ROWS = 100
"""Rows that are printed as a table."""
SAFE = "the store was only read"
ENDINGS = {".json": "json", ".csv": "csv", ".parquet": "parquet"}


@contextmanager
def long_question_hint(bounds: Bounds) -> Iterator[None]:
    """Say, where what is done within the block takes long, how it can be ended and when it will be."""
    ends = f"after {bounds.seconds:g} s (--seconds), or with Ctrl-C, which harms nothing"
    timer = Timer(
        PATIENCE_SECONDS, lambda: print(f"The question is still being answered. It ends {ends}.", file=sys.stderr)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def answer_format(form: str, output: str) -> str:
    """Return the format asked for, or that of the file's ending."""
    form = form or ENDINGS.get(Path(output).suffix, "" if output else "table")
    if form == "parquet" and not output:
        raise QuestionError("Parquet is not for the terminal", "", SAFE, "name a file with --output FILE")
    if output and form in ("", "table"):
        endings = ", ".join(ENDINGS)
        raise QuestionError("in which format?", output, SAFE, f"let the file end in {endings}, or give --format")
    return form


def write(answer: pa.Table, form: str, path: Path) -> None:
    """Write an answer to a file."""
    if form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(answer, path)
    else:
        path.write_text(_text(answer, form), encoding="utf-8")


def show(answer: pa.Table, form: str) -> None:
    """Print an answer."""
    if form == "table":
        _print_answer(answer)
    else:
        # On a terminal a cell could move the cursor or colour the screen; a program gets it exactly.
        text = _text(answer, form)
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)


def _text(answer: pa.Table, form: str) -> str:
    """Return an answer as CSV, or as a JSON array of objects; times are ISO 8601."""
    if form == "json":
        return json.dumps(answer.to_pylist(), default=_plain) + "\n"
    import pyarrow.csv as pacsv

    sink = pa.BufferOutputStream()
    pacsv.write_csv(_without_lists(answer), sink)
    return str(sink.getvalue().to_pybytes().decode())


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return float(value) if isinstance(value, Decimal) else str(value)


def _without_lists(answer: pa.Table) -> pa.Table:
    """Write lists and structs as JSON text: CSV has no word for them."""
    for place, field in enumerate(answer.schema):
        if pa.types.is_nested(field.type):
            values = answer[place].to_pylist()
            texts = [None if value is None else json.dumps(value, default=_plain) for value in values]
            answer = answer.set_column(place, field.name, pa.array(texts, pa.string()))
    return answer


def _print_answer(answer: pa.Table) -> None:
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
