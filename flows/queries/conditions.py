"""Conditions on rollouts: SQL expressions for the viewer's search and for `--where` of commands.

A condition is an expression in DuckDB's SQL over the columns of view `rollouts`, such as
`reward > 0.8 and length < 20 and reply ~ 'x'`; regular expressions are RE2's, whose time is linear in the text.
`condition_process` parses and evaluates it.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from threading import Event
from typing import NamedTuple

import polars as pl
import pyarrow as pa

from flows.queries.condition_process import INDEX, LIMITS, TABLE, ConditionFailed, true_rows
from flows.queries.request import BadQuestion
from flows.queries.views import ROLLOUT_COLUMNS
from storage.read.frames import Frames
from storage.read.query_limits import Bounds

TEXTS = ("reply", "note", "prompt", "error_message", "error_traceback")
"""Columns of which a hit shows the text around a match."""
FLAGS = ("is_truncated", "trainable", "for_training", "keep", "trained", "stale")
"""Columns that are true or false: each is a condition by itself."""
EXAMPLE = "reward > 0.8 and length < 20 and reply ~ 'text or regular expression'"
HELP = (
    f"A condition is SQL with text in single quotes, for example {EXAMPLE}. A named reward is "
    f"(rewards->>'$.NAME.score')::double.\nThe columns of rollouts are: {', '.join(ROLLOUT_COLUMNS)}."
)
_NO_COLUMNS = re.compile(r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/", re.DOTALL)
_SEARCHED = re.compile(rf"""\b({"|".join(TEXTS)})\b"?\s*(?<!!)~(\*?)\s*'((?:[^']|'')+)'""", re.IGNORECASE)
_MISTAKEN = re.compile(
    rf"""(?:{"|".join(ROLLOUT_COLUMNS)})"?\s*[<>=!~].*|"?\w+"?\s*(?:[<>=!~]+|i?like)\s*(?:'.*'|[\d.]+)""",
    re.IGNORECASE | re.DOTALL,
)
"""What is meant for a condition though a bracket is missing or a name misspelt."""
# Of `step-by-step`, arithmetic on a column and other words, the latter are no columns that somebody misspelt.
_IS_CONDITION = """
(
    with parsed as (select json_serialize_sql({query}) as tree),
    clauses as (
        select tree, json_extract(tree, '$.statements[0].node.where_clause') as clause, clause->>'class' as class
        from parsed
    ),
    columns as (
        select list_has_any(list_transform(value->>'$[*]', lambda name: lower(name)), {columns}) as is_known
        from clauses, json_tree(clause)
        where key = 'column_names'
    )
    select json_extract(any_value(tree), '$.statements[1]') is null and bool_or(is_known)
        and any_value(class) <> 'COLUMN_REF' and (any_value(class) in {operators} or bool_and(is_known))
    from clauses, columns
)
"""
_OPERATORS = ("COMPARISON", "CONJUNCTION", "BETWEEN", "OPERATOR", "SUBQUERY")
"""DuckDB's classes of expressions that are no words of a text."""
_ONE_ROW = pa.table({INDEX: [0]})


class BadCondition(BadQuestion):
    """A text is no condition on rollouts."""


class Pattern(NamedTuple):
    """A regular expression that a condition searches for in a column of texts."""

    column: str
    regex: str


@dataclass(frozen=True)
class Condition:
    """A condition as it was written."""

    text: str

    @cached_property
    def columns(self) -> frozenset[str]:
        """The columns of rollouts that it may name."""
        words = re.findall(r"\w+", _NO_COLUMNS.sub(" ", self.text).lower())
        return frozenset(ROLLOUT_COLUMNS).intersection(words)

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """The regular expressions that it looks for in texts."""
        return tuple(
            Pattern(column.lower(), ("(?i)" if any_case else "") + regex.replace("''", "'"))
            for column, any_case, regex in _SEARCHED.findall(self.text)
        )


def search_condition(text: str) -> Condition:
    """Return the condition of a text from a search field.

    `/x/` is a regular expression in replies, `/x/i` in any case. What DuckDB parses as an expression over columns, a
    single one where it is true or false, is a condition, and so is one with a mistake in a comparison. Another text, or
    one in quotes, is searched in replies and notes, in any case.
    """
    text = text.strip()
    if match := re.fullmatch(r"/(.+)/(i?)", text, re.DOTALL):
        return Condition(f"reply ~{'*' if match[2] else ''} {sql_text(match[1])}")
    quoted = re.fullmatch(r"\"([^\"]+)\"|'([^']+)'", text)
    if not quoted and (_MISTAKEN.fullmatch(text) or _is_expression(text)):
        return Condition(text)
    words = any_case((quoted[1] or quoted[2]) if quoted else text)
    return Condition(f"reply ~* {words} or note ~* {words}")


def _is_expression(text: str) -> bool:
    columns = Condition(text).columns
    if not columns:
        return False
    if text.lower() in columns:
        return text.lower() in FLAGS
    query = sql_text(f"select 1 from {TABLE} where (\n{text}\n)")
    try:
        return bool(true_rows(_ONE_ROW, _IS_CONDITION.format(query=query, columns=[*columns], operators=_OPERATORS)))
    except ConditionFailed:
        return False


def sql_text(text: str) -> str:
    """Return a text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def any_case(text: str) -> str:
    """Return the regular expression, as SQL writes it, that finds a text with `~*`."""
    return sql_text(pl.escape_regex(text))


def matching_traces(frames: Frames, where: str, limits: Bounds = LIMITS) -> tuple[list[str], int]:
    """Return the sorted ids of the rollouts that meet a condition, all where it is empty, and how many were read.

    Raises BadCondition as `matching_rows` does. Of the rollouts only the columns that the condition names are read.
    """
    condition = Condition(where)
    rows = frames["rollouts"].select("trace_id", *sorted(condition.columns - {"trace_id"})).collect()
    hits = matching_rows(rows, condition, limits=limits) if where else rows
    return hits["trace_id"].unique().sort().to_list(), rows["trace_id"].n_unique()


def matching_rows(
    rows: pl.DataFrame, condition: Condition, reader_gone: Event | None = None, limits: Bounds = LIMITS
) -> pl.DataFrame:
    """Return the rows for which a condition holds, in their order. `rows` have the columns that it names.

    Raises BadCondition if it is none, fails on a value, reaches a limit of memory or time, or if `reader_gone` is set
    before it ends.
    """
    table = rows.with_row_index(INDEX).select(INDEX, *sorted(condition.columns)).to_arrow()
    try:
        return rows[true_rows(table, condition.text, reader_gone, limits)]
    except ConditionFailed as error:
        unknown = re.search('column "(.+)" not found', str(error))
        near = get_close_matches(unknown[1].lower(), ROLLOUT_COLUMNS) if unknown else ()
        hint = f"\nThe nearest columns are {', '.join(near)}." if near else ""
        raise BadCondition(f"the condition {condition.text[:200]!r} {error}.{hint}\n{HELP}") from error
