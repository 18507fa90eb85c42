"""Conditions on rollouts: one language for the viewer's search, `quarantine --where`, `traces --where` and SQL.

A condition is DuckDB's SQL over the columns of the table `rollouts`: `reward > 0.8 and length < 20 and reply ~ 'x'`.
Text may stand in double quotes behind an operator, and `"reward:NAME"` and `"metric:NAME"` are named rewards and
metrics. Regular expressions are RE2's, whose time is linear in the text. Here a condition is only parsed;
`condition_process` evaluates it.
"""

import json
import re
from dataclasses import dataclass
from threading import Event
from typing import Any, NamedTuple

import polars as pl

from flows.queries.condition_process import INDEX, ConditionEnded, ConditionFailed, true_rows
from flows.queries.request import MOST, BadQuestion, parse_object
from flows.queries.row_lineage import nearest
from flows.queries.views import ROLLOUT_COLUMNS, schema
from storage.read.query_limits import SANDBOX

TABLE = "rollouts"
MAX_BRACKETS = 300
"""Brackets that a condition may open; JSON of more levels is more than some Pythons read."""
TEXTS = ("reply", "note", "prompt", "error_message", "error_traceback")
"""Columns of which a hit shows the piece that was searched for."""
EXAMPLE = "reward > 0.8 and length < 20 and reply ~ 'text or regular expression'"
_NAMED = {"reward": ("rewards", "/score"), "metric": ("metrics", "")}
"""By prefix of a named value: the column whose JSON has it, and where in it the number is."""
_TOKENS = re.compile(r"""'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/|"((?:[^"]|"")*)\"""", re.DOTALL)
_BEHIND_OPERATOR = re.compile(r"(?:[~=<>*]|\b(?:like|ilike))\s*\Z", re.IGNORECASE)
_SEARCHED = re.compile(rf"""\b({"|".join(TEXTS)})\b"?\s*(?<!!)~(\*?)\s*'((?:[^']|'')+)'""", re.IGNORECASE)
_CLAUSES = ("modifiers", "group_expressions", "having", "sample", "qualify")
_CLASSES = ("COMPARISON", "CONJUNCTION", "BETWEEN", "OPERATOR")
"""The parser's classes of expressions that are no search for a text."""


class BadCondition(BadQuestion):
    """A text is no condition on rollouts."""


class Pattern(NamedTuple):
    """A regular expression that a condition searches for in a column of texts."""

    column: str
    regex: str


@dataclass(frozen=True)
class Condition:
    """A parsed condition."""

    text: str
    """As it was written."""
    sql: str
    """The same without short forms, for `stagecoach sql`."""
    columns: frozenset[str]
    named: tuple[tuple[str, str], ...]
    """The named values in it: reward or metric, and the name."""
    patterns: tuple[Pattern, ...]
    kind: str
    """The parser's class of the whole expression."""


def condition_of(text: str) -> Condition:
    """Return a parsed condition. Raises BadCondition, which names the nearest columns of an unknown one."""
    if not text.strip():
        raise _refusal("one condition is asked for, and there is none")
    if text.encode(errors="ignore").decode() != text:
        raise _refusal(f"{text!r} is not text in UTF-8")
    sql, named = _in_full(text)
    kind, nodes = _parse(sql, text)
    names = [node["column_names"][-1] for node in nodes if node.get("class") == "COLUMN_REF"]
    # A query within the condition has columns of its own tables, and a function on lists has parameters.
    inner = any(node.get("class") in ("SUBQUERY", "LAMBDA") for node in nodes)
    for name in names:
        if name.lower() not in ROLLOUT_COLUMNS and not inner:
            near = ", ".join(nearest(name.lower(), ROLLOUT_COLUMNS))
            raise _refusal(f"{text!r}: there is no column {name!r}{f'; the nearest are {near}' if near else ''}")
    columns = frozenset(name.lower() for name in names if name.lower() in ROLLOUT_COLUMNS)
    patterns = [
        Pattern(column.lower(), ("(?i)" if any_case else "") + regex.replace("''", "'"))
        for column, any_case, regex in _SEARCHED.findall(sql)
    ]
    return Condition(text, sql, columns, named, tuple(patterns), kind)


def search_condition(text: str) -> Condition:
    """Return the condition of a text from a search field.

    `/x/` is a regular expression in replies, `/x/i` in any case; what is no condition, or is in quotes, is a text in
    replies or notes, in any case. Raises BadCondition for a text that begins like a condition and is none.
    """
    text = text.strip()
    if match := re.fullmatch(r"/(.+)/(i?)", text, re.DOTALL):
        return condition_of(f"reply ~{'*' if match[2] else ''} {sql_text(match[1])}")
    if match := re.fullmatch(r"\"([^\"]+)\"|'([^']+)'", text):
        return _plain_text(match[1] or match[2])
    try:
        condition = condition_of(text)
    except BadCondition:
        if re.search(
            rf"\b({'|'.join(ROLLOUT_COLUMNS)})\"?\s*([<>=!~]|(not\s+)?(like|ilike|in|is|between)\b)", text, re.I
        ):
            raise
        # Words with an operator between them that parse: a column's name may be misspelt.
        if re.fullmatch(r"\s*\"?\w+\"?\s*([<>=!~]+|like|ilike)\s*('.*'|\".*\"|[\d.]+)\s*", text, re.I | re.DOTALL):
            raise
        return _plain_text(text)
    is_flag = condition.kind == "COLUMN_REF" and any(
        schema("rollouts")[name] == pl.Boolean for name in condition.columns
    )
    of_columns = condition.columns and condition.kind != "COLUMN_REF"
    return condition if condition.kind in _CLASSES or of_columns or is_flag else _plain_text(text)


def sql_text(text: str) -> str:
    """Return a text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def any_case(text: str) -> str:
    """Return the regular expression, as SQL writes it, that finds a text with `~*`."""
    return sql_text(pl.escape_regex(text))


def _plain_text(text: str) -> Condition:
    if not text:
        raise BadCondition("nothing is looked for")
    return condition_of(f"reply ~* {any_case(text)} or note ~* {any_case(text)}")


def matching_rows(rows: pl.DataFrame, condition: Condition, reader_gone: Event | None = None) -> pl.DataFrame:
    """Return the rows for which a condition holds, in their order. `rows` have the columns that it names.

    The condition is evaluated in a child process; see `condition_process.true_rows`. Raises BadCondition if it fails on
    a value, reaches a limit of memory or time, or if `reader_gone` is set before it ends.
    """
    _require_named(rows, condition)
    table = rows.with_row_index(INDEX).select(INDEX, *sorted(condition.columns)).to_arrow()
    try:
        return rows[true_rows(table, condition.sql, reader_gone)]
    except ConditionEnded as error:
        raise BadCondition(f"the condition {error}: {condition.text!r}. Nothing was changed.") from error
    except ConditionFailed as error:
        raise _refusal(f"{condition.text!r}: {error}") from error


def _in_full(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return a condition with text in single quotes and named values as JSON, and these names."""
    named: list[tuple[str, str]] = []

    def put(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        said = found[1].replace('""', '"')
        kind, colon, name = said.partition(":")
        if colon and kind in _NAMED and name:
            named.append((kind, name))
            column, within = _NAMED[kind]
            pointer = "/" + name.replace("~", "~0").replace("/", "~1") + within
            return f"try_cast(json_extract_string({column}, {sql_text(pointer)}) as double)"
        is_text = said.lower() not in ROLLOUT_COLUMNS and _BEHIND_OPERATOR.search(text[: found.start()])
        return sql_text(said) if is_text else found[0]

    sql = _TOKENS.sub(put, text)
    return sql, tuple(dict.fromkeys(named))


def _parse(sql: str, text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the parser's class of a condition, and all objects of its syntax tree."""
    import duckdb

    too_deep = _refusal(f"{text[:MOST]!r}... is nested too deeply: write {MAX_BRACKETS} levels at most")
    if sql.count("(") > MAX_BRACKETS:
        raise too_deep
    query = f"select 1 from {TABLE} where (\n{sql}\n)"
    with duckdb.connect(config=dict(SANDBOX)) as connection:
        row = connection.execute("select json_serialize_sql(?)", [query]).fetchone()
    nodes: list[dict[str, Any]] = []

    def add_node(node: dict[str, Any]) -> dict[str, Any]:
        nodes.append(node)
        return node

    try:
        answer = json.loads(row[0], object_hook=add_node) if row else {}
    except RecursionError:  # levels without brackets; DuckDB's parser and each Python refuse other depths
        raise too_deep from None
    if answer.get("error", True):
        raise _refusal(f"{text!r} is no condition: {answer.get('error_message', 'it is empty')}")
    # A bracket that closes ours could put a statement, or a clause, of its own behind it.
    node = answer["statements"][0]["node"]
    tree = node.get("where_clause")
    if len(answer["statements"]) != 1 or tree is None or any(node[name] for name in _CLAUSES):
        raise _refusal(f"one condition is asked for, not {text!r}")
    return tree["class"], nodes


def _require_named(rows: pl.DataFrame, condition: Condition) -> None:
    """Raise BadCondition where no row has a named reward or metric that a condition speaks of."""
    for kind, name in condition.named:
        values = rows[_NAMED[kind][0]].unique().to_list()
        names = sorted({name for text in values for name in parse_object(text)})
        if name not in names and rows.height:
            near = ", ".join(nearest(name, names)) or "none"
            raise BadCondition(f"no rollout has a {kind} named {name!r}; the nearest are: {near}")


def _refusal(what: str) -> BadCondition:
    return BadCondition(
        f'{what}\nThe columns of rollouts are: {", ".join(ROLLOUT_COLUMNS)}, and "reward:NAME" and "metric:NAME". '
        f"Text stands in single quotes.\nSay for example {EXAMPLE}"
    )
