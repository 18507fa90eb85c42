"""The command sql: queries the tables of a store, and prints or writes the answer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from configs.store import default_store
from flows.cli.arguments import Count, Force, Json, Positive, StoreOption, option
from flows.reporting.formats import console, fits_width, grid, say, tab_separated, visible

if TYPE_CHECKING:
    import pyarrow as pa

MOST_ROWS = 100
"""Rows that are printed as a table."""
SAFE = "the store was only read"
ENDINGS = (".json", ".csv", ".parquet")


def sql(
    query: Annotated[str, option("one SELECT statement; without it, the tables are listed")] = "",
    /,
    *,
    output: Annotated[str, option("write the answer to a .json, .csv or .parquet file", "FILE")] = "",
    tokens: Annotated[bool, option("include the columns with a value per token")] = False,
    force: Force = False,
    rows: Annotated[Count, option("maximum number of rows in the answer")] = 10_000_000,
    memory: Annotated[Positive, option("maximum memory, in GiB")] = 4.0,
    seconds: Annotated[Positive, option("maximum time, in seconds")] = 600.0,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print or write the answer to a query, or list the tables.

    Raises QuestionError with the database's message, LayoutError without a store.
    """
    import pyarrow as pa

    from flows.queries.views import relations
    from flows.reporting.output_files import check_output, write_whole
    from storage.read.damage import reading
    from storage.read.frames import Frames, existing_store
    from storage.read.query_limits import Bounds
    from storage.read.sql import QuestionError, ask, columns_of

    frames = Frames(existing_store(store or default_store()), relations)
    if not query:
        for name in frames.names:
            say(f"{name}: {', '.join(columns_of(frames, name, tokens))}")
        return 0
    if output:
        check_output(Path(output), force)  # before a long query, not after it
        if Path(output).suffix not in ENDINGS:
            raise QuestionError("in which format?", output, SAFE, f"let the file end in {', '.join(ENDINGS)}")
    with reading(frames.store):
        answer = ask(frames, query, tokens, Bounds(rows, memory, seconds))
    try:
        if output:
            write_whole(Path(output), lambda draft: _write(answer, Path(output).suffix, draft), force)
            print(f"{answer.num_rows} rows in {output}")
        elif as_json:
            # On a terminal a cell could move the cursor or colour the screen; a program gets it exactly.
            text = _as_json(answer)
            print(visible(text) if console().is_terminal else text)
        elif fits_width():
            _print_answer(answer)
        else:
            values = zip(*(column.to_pylist() for column in answer.columns), strict=True)
            print(tab_separated(answer.column_names, values))
    # A value that Python, CSV or Parquet cannot hold: a date of the year 290,000, an interval, a union.
    except (OverflowError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        advice = "cast the column to varchar"
        raise QuestionError(f"the answer cannot be shown: {error}", query, SAFE, advice) from error
    return 0


def _write(answer: "pa.Table", ending: str, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    if ending == ".parquet":
        pq.write_table(answer, path)
    elif ending == ".json":
        path.write_text(_as_json(answer) + "\n", encoding="utf-8")
    else:
        columns = [  # CSV has no word for lists and structs: they are JSON
            pa.array([value if value is None else _as_json(value) for value in column.to_pylist()])
            if pa.types.is_nested(column.type)
            else column
            for column in answer.columns  # by place: two may have one name
        ]
        csv.write_csv(pa.table(columns, names=answer.column_names), path)


def _as_json(value: Any) -> str:
    """Return an answer as a JSON array of objects, or a value of it; times are ISO 8601."""
    import json
    from datetime import datetime
    from decimal import Decimal

    def plain(value: Any) -> Any:
        if isinstance(value, datetime):
            return value.isoformat()
        return float(value) if isinstance(value, Decimal) else str(value)

    return json.dumps(value.to_pylist() if hasattr(value, "to_pylist") else value, default=plain)


def _print_answer(answer: "pa.Table") -> None:
    import pyarrow as pa

    types = enumerate(field.type for field in answer.schema)
    left = [place for place, kind in types if not (pa.types.is_integer(kind) or pa.types.is_floating(kind))]
    columns = [map(_cell, column.to_pylist()) for column in answer.slice(0, MOST_ROWS).columns]
    out = console()
    out.print(grid(answer.column_names, zip(*columns, strict=True), left))
    if answer.num_rows > MOST_ROWS:
        out.print(f"... and {answer.num_rows - MOST_ROWS} more rows: --output FILE has all")


def _cell(value: Any) -> str:
    if hasattr(value, "isoformat"):
        return str(value)[:19]
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
