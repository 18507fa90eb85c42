"""The command sql: queries the tables of a store, and prints or writes the answer."""

from pathlib import Path
from typing import Annotated, Literal

from configs.store import default_store
from flows.cli.arguments import Count, Force, OfRun, Positive, StoreOption, option
from flows.reporting.formats import say


def sql(
    query: Annotated[str, option("one SELECT statement; without it, the tables are listed")] = "",
    /,
    *,
    form: Annotated[Literal["table", "json", "csv", "parquet"] | None, option("output format", name="--format")] = None,
    output: Annotated[str, option("write the answer to a file instead of printing it", "FILE")] = "",
    tokens: Annotated[bool, option("include the columns with a value per token")] = False,
    force: Force = False,
    rows: Annotated[Count, option("maximum number of rows in the answer")] = 10_000_000,
    memory: Annotated[Positive, option("maximum memory, in GiB")] = 4.0,
    seconds: Annotated[Positive, option("maximum time, in seconds")] = 600.0,
    run: OfRun = "",
    store: StoreOption = "",
) -> int:
    """Print or write the answer to a query, or list the tables.

    Raises QuestionError with the database's message, RunUnknown, LayoutError without a store.
    """
    import pyarrow as pa

    from flows.cli.sql_answer import SAFE, answer_format, long_question_hint, show, write
    from flows.queries.views import relations
    from flows.reporting.output_files import check_output, write_whole
    from storage.read.damage import reading
    from storage.read.frames import Frames, existing_store
    from storage.read.query_limits import Bounds
    from storage.read.sql import QuestionError, ask, columns_of

    frames = Frames(existing_store(store or default_store()), relations)
    # The tables under their plain names are then those of the run.
    frames = frames.run(run) if run else frames
    if not query:
        for name in frames.names:
            say(f"{name}: {', '.join(columns_of(frames, name, tokens))}")
        return 0
    kind, bounds = answer_format(form or "", output), Bounds(rows, memory, seconds)
    if output:
        check_output(Path(output), force)  # before a long question, not after it
    with reading(frames.store), long_question_hint(bounds):
        answer = ask(frames, query, tokens, bounds)
    try:
        if output:
            write_whole(Path(output), lambda draft: write(answer, kind, draft), force)
            print(f"{answer.num_rows} rows in {output}")
        else:
            show(answer, kind)
    # A value that Python, CSV or Parquet cannot hold: a date of the year 290,000, an interval, a union.
    except (OverflowError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        advice = "cast the column to varchar"
        raise QuestionError(f"the answer cannot be shown as {kind}: {error}", query, SAFE, advice) from error
    return 0
