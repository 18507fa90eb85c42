"""Answers SQL over the tables of a store, read-only; columns with a value per token only where they are asked for.

The database lives in memory for one question. It cannot reach files, the network or extensions; the tables are handed
to it as Arrow datasets, from which it takes the columns and rows that the question needs. What a question may cost is
bounded, in rows, memory and time: `storage.read.query_limits.Bounds`.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from threading import Event, Thread
from typing import Any

import pyarrow as pa

from storage.errors import StoreError
from storage.read.frames import USES, Frames, damage_of
from storage.read.query_limits import DEFAULT, SANDBOX, Bounds, bounded_memory
from storage.read.views import Relations, create_views, quote, words_of
from storage.schemas.contract import FLAGS, FLOATS, INDICES, TOKENS
from storage.schemas.stage_tables import TABLES
from storage.schemas.system_tables import SYSTEM_TABLES

PER_TOKEN = (TOKENS, FLAGS, FLOATS, INDICES)
OWN_SCHEMAS = ("main", "temp", "system", "information_schema", "pg_catalog")
READ_STATEMENTS = ("SELECT", "EXPLAIN")
BATCH_ROWS = 10_000
WAIT_SECONDS = 0.2
"""The longest that Ctrl-C may be overlooked."""


class QuestionError(StoreError):
    """A question that is no SQL, asks for what is not there, costs too much, or wants to do more than read."""


def ask(frames: Frames, sql: str, tokens: bool = False, bounds: Bounds = DEFAULT) -> pa.Table:
    """Answer one SELECT over the tables of a store.

    Tables go by name; `RUN.table` are the rows that a run uses, whoever computed them. Columns that hold a value per
    token are absent unless `tokens`. Raises QuestionError, with the database's own message, or where a bound is
    reached.
    """
    import duckdb

    if sql.encode(errors="ignore").decode() != sql:
        raise QuestionError("the question is no text in UTF-8", repr(sql), _SAFE, "write it in UTF-8")
    connection = duckdb.connect(":memory:", config={**SANDBOX, "memory_limit": f"{bounds.memory}B"})
    try:
        _require_read_only(connection.extract_statements(sql), sql)
        for schema, own in (("main", frames), *_schemas(frames, sql)):
            _register(connection, schema, own, sql, tokens)
        # Locked before the question is run, which could otherwise change the settings.
        connection.execute("set TimeZone = 'UTC'; set lock_configuration = true")
        with bounded_memory(bounds):
            return _with_integers(
                _within(bounds.seconds, connection, lambda: _answer(connection.sql(sql), bounds, sql))
            )
    # From nothing: an error of the system or of Arrow would be looked into as damage.
    except TimeoutError:
        raise _too_much(f"takes longer than {bounds.seconds:g} s", "--seconds", sql) from None
    except (duckdb.OutOfMemoryException, pa.ArrowMemoryError, MemoryError):
        raise _too_much(f"needs more than {bounds.memory_gib:g} GiB of memory", "--memory", sql) from None
    except duckdb.Error as error:
        if damage := damage_of(error, frames.store.root):
            raise damage from OSError(str(error))
        raise _refusal(str(error), sql, frames, tokens) from error
    finally:
        connection.close()


def _answer(relation: Any, bounds: Bounds, sql: str) -> pa.Table:
    """Take an answer batch by batch: of one with too many rows no more than that is ever in memory."""
    import duckdb

    batches: list[pa.RecordBatch] = []
    reader, rows = relation.to_arrow_reader(BATCH_ROWS), 0
    try:
        for batch in reader:
            rows += batch.num_rows
            if rows > bounds.rows:
                raise _too_much(f"has an answer of more than {bounds.rows} rows", "--rows", sql)
            batches.append(batch)
    except OSError as error:  # Arrow passes on what the database says, and not as what
        if "Out of Memory" in str(error):
            raise MemoryError(str(error)) from error
        raise duckdb.Error(str(error)) from error
    return pa.Table.from_batches(batches, reader.schema)


def _within(seconds: float, connection: Any, work: Callable[[], pa.Table]) -> pa.Table:
    """Return what `work` returns, and end it where it takes longer, which raises TimeoutError, or at Ctrl-C.

    It is done in a thread: in this one the database would notice Ctrl-C in some of its loops alone.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # a pool that is interrupted as it starts its thread would not wait for it
        try:
            return _result(pool.submit(work), seconds)
        except (TimeoutError, KeyboardInterrupt):
            with _again_and_again(connection.interrupt):  # the work may only be about to begin
                pool.shutdown(cancel_futures=True)
            raise


def _result(future: "Future[pa.Table]", seconds: float) -> pa.Table:
    """Return what a future returns; raises TimeoutError after `seconds`.

    It is waited for a little at a time: a signal that comes just before a wait begins is handled only when it ends.
    """
    end = time.monotonic() + seconds
    while not future.done() and (left := end - time.monotonic()) > 0:
        wait([future], min(left, WAIT_SECONDS))
    return future.result(0)


@contextmanager
def _again_and_again(act: Callable[[], None]) -> Iterator[None]:
    """Call something every 50 ms within the block."""
    over = Event()

    def repeat() -> None:
        while not over.wait(0.05):
            act()

    Thread(target=repeat, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _too_much(what: str, option: str, sql: str) -> QuestionError:
    advice = f"ask for less (where, limit, count); `stagecoach sql` allows more with {option}"
    return QuestionError(f"the question {what}, and was ended", sql, _SAFE, advice)


def _with_integers(answer: pa.Table) -> pa.Table:
    """Sums of integers come as decimals of 38 digits; where they fit into 64 bits, they are integers again."""
    for place, field in enumerate(answer.schema):
        if field.type == pa.decimal128(38, 0):
            with suppress(pa.ArrowInvalid):  # too large: the digits matter more than the type
                answer = answer.set_column(place, field.name, answer.column(place).cast(pa.int64()))
    return answer


def columns_of(frames: Frames, name: str, tokens: bool = False) -> list[str]:
    """The columns of a table or view as questions see it."""
    if name in frames.views:
        return list(frames.views[name].columns)
    if name == USES.name:
        return USES.arrow.names
    per_token = {column.name for column in TABLES[name].columns if column.type in PER_TOKEN and not tokens}
    table = TABLES[name]
    names = (table.arrow if table in SYSTEM_TABLES else table.stored).names
    return [column for column in names if column not in per_token]


def _require_read_only(statements: Sequence[Any], sql: str) -> None:
    try:
        kinds = [str(statement.type.name) for statement in statements]
    except ValueError:  # a kind that the library itself has no name for, such as that of `update extensions`
        kinds = ["This"]
    if len(kinds) != 1:
        raise QuestionError(f"one SELECT at a time, not {len(kinds) or 'none'}", sql, _SAFE, "ask one question")
    if kinds[0] not in READ_STATEMENTS:
        raise QuestionError(f"{kinds[0]} is not a question: the store is only read", sql, _SAFE, "begin with SELECT")


def _schemas(frames: Frames, sql: str) -> list[tuple[str, Frames]]:
    """The runs that the question names as schemas, with their rows."""
    # Looked for in the text: the database names a schema that it lacks only by failing.
    schema = r'(?<![\w-]){}"?\s*\.'
    names = [run for run in frames.run_names if run.lower() not in OWN_SCHEMAS]
    return [(run, frames.run(run)) for run in names if re.search(schema.format(re.escape(run)), sql)]


def _register(connection: Any, schema: str, frames: Frames, sql: str, tokens: bool) -> None:
    """Make a view of every table whose name is in the question: to open the others would be a waste."""
    words = words_of(sql)
    named = [name for name in frames.names if name in words]
    tables: Relations = {name: partial(frames.dataset, name) for name in (*TABLES, USES.name)}
    create_views(connection, {**tables, **frames.relations}, sql, frames.views, inner := f"{schema}/all")
    connection.execute(f"create schema if not exists {quote(schema)}")
    for name in named:
        columns = "*" if name in frames.views else ", ".join(map(quote, columns_of(frames, name, tokens)))
        connection.execute(f"create view {quote(schema)}.{name} as select {columns} from {quote(inner)}.{name}")


def _refusal(message: str, sql: str, frames: Frames, tokens: bool) -> QuestionError:
    if absent := re.search(r"Table with name (\S+) does not exist", message):  # the database suggests its own tables
        near = get_close_matches(absent[1], frames.names, 1)
        message = f"no table {absent[1]!r}" + (f"; did you mean {near[0]}?" if near else "")
    hidden = {c.name for table in TABLES.values() for c in table.columns if c.type in PER_TOKEN}
    advice = f"the tables are {', '.join(frames.names)}; `stagecoach sql` alone lists their columns"
    if not tokens and any(re.search(rf"\b{name}\b", sql) for name in hidden):
        advice = "columns with a value per token are left out unless they are asked for: add --tokens"
    return QuestionError(message, sql, _SAFE, advice)


_SAFE = "the store was only read"
