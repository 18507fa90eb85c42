"""Views: the SQL views of a store, one `.sql` file each, over the rows that the ledger names.

The first comment of a file says what one row is, and the outermost select list has a line for each column with a
comment of its meaning. A view reads tables, other views, and relations that the caller makes, such as `lineages`. A
join that ends in `-- only for A, B` is empty unless a query names one of these columns or `*`; columns `only where
named` are no part of `*`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.read.query_limits import SANDBOX
from storage.schemas.contract import SLICE_COLUMNS
from storage.schemas.stage_tables import TABLES

if TYPE_CHECKING:
    import polars as pl

Relations = Mapping[str, Callable[[], Any]]
"""Makes the tables and relations that views read, by name: frames or datasets that DuckDB can scan."""
_NO_WORDS = re.compile(r"('(?:[^']|'')*')|--.*|\bas +\"?\w+", re.IGNORECASE)
"""Comments, and names that a query gives; literals, which are group 1, hold neither."""
_ALL = re.compile(r"(?<!count\()\*|(?:^|\()\s*(?:from|table)\b|^\s*(?:summarize|desc|describe|show)\b|\bcolumns\s*\(")
"""What asks for all columns: a `*` that does not count, a query without a select list, `columns(...)`."""
_JOIN = re.compile(r"^left join (\w+) (.*?) +-- only for (.+)$", re.MULTILINE)
_ALL_COLUMNS = re.compile(r"(\w+)\.\* replace \((.+)\)")
_COLUMN = re.compile(r"^    .*?(?:(\w+)\.\*.*?|\"?(\w+)\"?),?  -- (.+)$", re.MULTILINE)
_HIDDEN = re.compile(r"^-- only where named: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class SqlView:
    """One view: its name, what a row is, and its text."""

    name: str
    row: str
    sql: str

    @cached_property
    def columns(self) -> dict[str, str]:
        """The meaning of each column, in order."""
        columns: dict[str, str] = {}
        for table, name, meaning in _COLUMN.findall(self.sql.partition("\nfrom ")[0].rpartition("select\n")[2]):
            if table:
                columns |= {column.name: column.meaning for column in (*SLICE_COLUMNS, *TABLES[table].columns)}
            else:
                columns[name] = meaning
        return columns

    @cached_property
    def hidden(self) -> frozenset[str]:
        """The columns that are no part of `*`."""
        return frozenset(name for names in _HIDDEN.findall(self.sql) for name in names.split(", "))

    def text(self, words: Collection[str]) -> str:
        """Return the view without the columns and joined rows that no word of a query needs."""

        def join(line: re.Match[str]) -> str:
            table, condition, names = line[1], line[2], set(line[3].split(", "))
            if names & set(words) or ("*" in words and not names <= self.hidden):
                return f"left join {table} {condition}"
            used = sorted({*re.findall(rf"\b{table}\.(\w+)", self.sql)})
            empty = ", ".join(f"null::varchar as {name}" for name in used)
            return f"left join (select {empty} limit 0) as {table} {condition}"

        def columns(all_columns: re.Match[str]) -> str:
            table = all_columns[1]
            names = TABLES[table].stored.names
            named = [name for name in names if name in words or ("*" in words and name not in self.hidden)]
            return ", ".join(all_columns[2] if name == "run" else f"{table}.{name}" for name in named or names[:1])

        def column(line: re.Match[str]) -> str:
            return "" if line[2] in self.hidden and line[2] not in words else line[0]

        return _ALL_COLUMNS.sub(columns, _COLUMN.sub(column, _JOIN.sub(join, self.sql)))


@cache
def all_views() -> dict[str, SqlView]:
    """Return the views by name, each after those that it reads."""
    views = {}
    for path in Path(__file__).parent.glob("*.sql"):
        sql = path.read_text(encoding="utf-8")
        name, _, row = sql.partition("\n")[0].removeprefix("-- ").partition(": ")
        assert name == path.stem, f"{path.name}: its first line is `-- {path.stem}: what one row is`"
        views[name] = SqlView(name, row, sql)
    reads = {name: sorted((views.keys() & words_of(view.sql)) - {name}) for name, view in sorted(views.items())}
    return {name: views[name] for name in TopologicalSorter(reads).static_order()}


def words_of(sql: str) -> set[str]:
    """Return the words of SQL in small letters, names of tables and columns among them, and `*` for all columns."""
    code = _code(sql).lower()
    return {*re.findall(r"\w+", code), *(["*"] if _ALL.search(code) else [])}


def _tables_of(sql: str) -> set[str]:
    """Return what a view reads: the names after `from` and `join`."""
    return {*re.findall(r"\b(?:from|join) (\w+)", _code(sql))}


def _code(sql: str) -> str:
    return _NO_WORDS.sub(lambda match: match[1] or "", sql)


def needed_views(query: str, views: Mapping[str, SqlView]) -> dict[str, str]:
    """Return the text of each of some views that a query reads, directly or through others, in the order of making."""
    texts, words, tables = {}, words_of(query), words_of(query)
    for view in reversed([*views.values()]):
        if view.name in tables:
            texts[view.name] = view.text(words)
            words |= words_of(texts[view.name])
            tables |= _tables_of(texts[view.name])
    return dict(reversed(texts.items()))


def create_views(connection: Any, relations: Relations, query: str, views: Mapping[str, SqlView], schema: str) -> None:
    """Create some views, of those that a query reads, in a new schema of a DuckDB connection, with their relations."""
    texts = needed_views(query, views)
    connection.execute(f"create schema {quote(schema)}; use memory.{quote(schema)}")
    for name in _register(connection, relations, [query, *texts.values()], f"{schema}/"):
        connection.execute(f"create view {name} as select * from temp.main.{quote(f'{schema}/{name}')}")
    for name, text in texts.items():
        connection.execute(f"create view {name} as {text}")
    connection.execute("use memory.main")


def _register(connection: Any, relations: Relations, texts: Iterable[str], prefix: str = "") -> list[str]:
    """Register the relations that a query and its views read; of lazy frames the named columns are read."""
    query, *views = texts
    words = set().union(*map(words_of, (query, *views)))
    tables = words_of(query).union(*map(_tables_of, views))
    names = [name for name in relations if name in tables]
    for name in names:
        connection.register(prefix + name, _named_columns(relations[name](), words))
    return names


def _named_columns(rows: Any, words: Collection[str]) -> Any:
    import polars as pl

    if not isinstance(rows, pl.LazyFrame):
        return rows
    return rows.select(name for name in rows.collect_schema().names() if name in words).collect()


def quote(name: str) -> str:
    """Return a name as SQL quotes it."""
    return '"' + name.replace('"', '""') + '"'


def select(relations: Relations, query: str, **parameters: Any) -> "pl.DataFrame":
    """Return the answer of a query over views, whose parameters are written `$name`.

    A relation with the name of a view takes its place. One thread runs the query: sums of floats then have one order,
    and training keeps the other processors.
    """
    texts = needed_views(query, {name: view for name, view in all_views().items() if name not in relations})
    # As parts of the query and not as views of the connection, each of which would be bound again in all that read it.
    parts = ",\n".join(f"{name} as not materialized (\n{text}\n)" for name, text in texts.items())
    with _database().cursor() as connection:
        _register(connection, relations, [query, *texts.values()])
        rows: pl.DataFrame = connection.sql(f"with {parts} {query}" if parts else query, params=parameters or None).pl()
        return rows


@cache
def _database() -> Any:
    """Return the database of this process, which holds nothing: to make one takes longer than most queries."""
    import duckdb

    connection = duckdb.connect(":memory:", config={**SANDBOX, "threads": "1"})
    connection.execute("set global TimeZone = 'UTC'")
    return connection
