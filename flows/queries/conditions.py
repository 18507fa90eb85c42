"""Conditions on rollouts: one language for the viewer's search, `quarantine --where`, `traces --where` and SQL.

A condition is DuckDB's SQL over the columns of the table `rollouts`: `reward > 0.8 and length < 20 and reply ~ 'x'`.
Two things are written more easily: text may stand in double quotes behind an operator, and `"reward:NAME"` and
`"metric:NAME"` are named rewards and metrics. Regular expressions are RE2's, whose time is linear in the text.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Timer
from typing import Any

import polars as pl

from flows.queries.request import BadQuestion, parse_object
from flows.queries.rollout_table import SCHEMA
from flows.queries.row_lineage import nearest
from storage.read.sql import SANDBOX

TABLE = "rollouts"
TEXTS = ("reply", "note", "prompt", "error_message", "error_traceback")
"""Columns of which a hit shows the piece that was looked for."""
EXAMPLE = "reward > 0.8 and length < 20 and reply ~ 'text or regular expression'"
_NAMED = {"reward": ("rewards", "/score"), "metric": ("metrics", "")}
"""By what the names of named values begin with: the column whose JSON has them, and where in it the number is."""
SECONDS, MEMORY = 60, "2GiB"
"""What a condition may cost beside the rows, before it is ended: a link may hold any."""
_PLACE = "place of the row"
_TOKENS = re.compile(r"""'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/|"((?:[^"]|"")*)\"""", re.DOTALL)
_BEHIND_OPERATOR = re.compile(r"(?:[~=<>*]|\b(?:like|ilike))\s*\Z", re.IGNORECASE)
_MATCHES = {"regexp_matches": "regex", "regexp_full_match": "regex", "regexp_like": "regex", "contains": "text"}
_OPERATORS = {"~": "regex", "~*": "regex i", "~~": "like", "~~*": "like i", "~~~": "text"}
_CLAUSES = ("modifiers", "group_expressions", "having", "sample", "qualify")
_CLASSES = ("COMPARISON", "CONJUNCTION", "BETWEEN", "OPERATOR")
"""What the parser calls expressions that nobody writes who looks for a text."""


class BadCondition(BadQuestion):
    """A text is no condition on rollouts."""


@dataclass(frozen=True)
class Pattern:
    """What a condition looks for in a column of texts."""

    column: str
    kind: str
    """regex or text."""
    text: str
    """Of a text, all in small letters."""
    any_case: bool = False


@dataclass(frozen=True)
class Condition:
    """A condition, taken apart."""

    text: str
    """As it was written."""
    sql: str
    """The same in SQL that says everything, for `stagecoach sql`."""
    columns: frozenset[str]
    """What it speaks of."""
    named: tuple[tuple[str, str], ...] = ()
    """The named values in it: reward or metric, and the name."""
    patterns: tuple[Pattern, ...] = ()
    tree: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The expression as the parser has it."""


def condition_of(text: str) -> Condition:
    """Return a condition taken apart. Raises BadCondition, with the columns and those named most like what is not."""
    if not text.strip():
        raise _refusal("one condition is asked for, and there is none")
    sql, named = _in_full(text)
    tree = _parse(sql, text)
    nodes = list(_nodes(tree))
    said = [each["column_names"][-1] for each in nodes if each.get("class") == "COLUMN_REF"]
    # A question within the condition may have columns of its own tables.
    inner = any(each.get("class") == "SUBQUERY" for each in nodes)
    for name in dict.fromkeys(said):
        if name.lower() not in SCHEMA and not inner:
            raise _unknown_column(name, text)
    columns = frozenset(name.lower() for name in said if name.lower() in SCHEMA)
    return Condition(text, sql, columns, named, tuple(_patterns(nodes)), tree)


def search_condition(text: str) -> Condition:
    """Return the condition that somebody means who types into a search field.

    `/x/` is a regular expression in replies, `/x/i` in any case; what is no condition, or is in quotes, is a text in
    replies or notes, in any case. Raises BadCondition for what begins like a condition and is none.
    """
    text = text.strip()
    if match := re.fullmatch(r"/(.+)/(i?)", text, re.DOTALL):
        return condition_of(f"reply ~{'*' if match[2] else ''} {sql_text(match[1])}")
    if match := re.fullmatch(r"\"([^\"]+)\"|'([^']+)'", text):
        return _plain_text(match[1] or match[2])
    try:
        found = condition_of(text)
    except BadCondition:
        if re.search(rf"\b({'|'.join(SCHEMA)})\"?\s*([<>=!~]|(not\s+)?(like|ilike|in|is|between)\b)", text, re.I):
            raise
        # Words with an operator between them that parse: a column's name may be misspelt.
        if re.fullmatch(r"\s*\"?\w+\"?\s*([<>=!~]+|like|ilike)\s*('.*'|\".*\"|[\d.]+)\s*", text, re.I | re.DOTALL):
            raise
        return _plain_text(text)
    if found.tree.get("class") in _CLASSES or (found.columns and found.tree.get("class") != "COLUMN_REF"):
        return found
    is_flag = any(SCHEMA[name] == pl.Boolean for name in found.columns)
    return found if is_flag else _plain_text(text)


def sql_text(text: str) -> str:
    """Return a text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def _plain_text(text: str) -> Condition:
    if not text:
        raise BadCondition("nothing is looked for")
    said = sql_text(text.lower())
    return condition_of(f"contains(lower(reply), {said}) or contains(lower(note), {said})")


def matching_rows(rows: pl.DataFrame, condition: Condition) -> pl.DataFrame:
    """Return the rows for which a condition holds, in their order. `rows` have the columns that it speaks of.

    Raises BadCondition where it fails on a value, or is no statement of its own. This is the border at which the
    database's errors become ours.
    """
    import duckdb

    _require_named(rows, condition)
    given = rows.select(sorted(condition.columns)).with_row_index(_PLACE)
    query = f'select "{_PLACE}" from {TABLE} where (\n{condition.sql}\n)'  # a comment in it ends with its line
    # The condition is a person's own text: without access to files it can read no others of theirs.
    with duckdb.connect(config={**SANDBOX, "memory_limit": MEMORY}) as connection:
        timer = Timer(SECONDS, connection.interrupt)
        arrow = given.to_arrow()
        for name in (TABLE, "traces"):  # for a question within the condition
            connection.register(name, arrow)
        timer.start()
        try:
            places = sorted(row[0] for row in connection.execute(query).fetchall())
        except duckdb.InterruptException as error:
            raise BadCondition(f"{condition.text!r} takes longer than {SECONDS} s, and was ended") from error
        except duckdb.Error as error:
            raise _refusal(f"{condition.text!r}: {str(error).splitlines()[0]}") from error
        finally:
            timer.cancel()
    return rows[places]


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
        is_text = said.lower() not in SCHEMA and _BEHIND_OPERATOR.search(text[: found.start()])
        return sql_text(said) if is_text else found[0]

    sql = _TOKENS.sub(put, text)
    return sql, tuple(dict.fromkeys(named))


def _parse(sql: str, text: str) -> Mapping[str, Any]:
    import duckdb

    query = f"select 1 from {TABLE} where (\n{sql}\n)"
    with duckdb.connect(config=dict(SANDBOX)) as connection:
        row = connection.execute("select json_serialize_sql(?)", [query]).fetchone()
    answer = json.loads(row[0]) if row else {}
    if answer.get("error", True):
        raise _refusal(f"{text!r} is no condition: {answer.get('error_message', 'it is empty')}")
    # A bracket that closes ours could put a statement, or a clause, of its own behind it.
    node = answer["statements"][0]["node"]
    tree: Mapping[str, Any] | None = node.get("where_clause")
    if len(answer["statements"]) != 1 or tree is None or any(node[name] for name in _CLAUSES):
        raise _refusal(f"one condition is asked for, not {text!r}")
    return tree


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object within an expression as the parser has it, the outer first."""
    waiting = [tree]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, Mapping):
            yield each
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _patterns(nodes: list[Mapping[str, Any]]) -> Iterator[Pattern]:
    """Yield what functions and operators on texts look for, where it is written out."""
    for node in nodes:
        kind = {**_MATCHES, **_OPERATORS}.get(str(node.get("function_name")))
        given = [list(_nodes(each)) for each in node.get("arguments", ())]
        if kind is None or len(given) < 2:
            continue
        columns = [str(each["column_names"][-1]).lower() for each in given[0] if each.get("class") == "COLUMN_REF"]
        texts = [_literal(each) for argument in given[1:] for each in argument if each.get("class") == "CONSTANT"]
        if not columns or columns[0] not in TEXTS or not texts or not texts[0]:
            continue
        lowered = any(each.get("function_name") == "lower" for each in given[0])
        any_case = lowered or kind.endswith(" i") or (kind == "regex" and "i" in "".join(texts[1:]))
        for piece in texts[0].replace("_", "%").split("%") if kind.startswith("like") else texts[:1]:
            if piece:
                yield Pattern(columns[0], "regex" if kind.startswith("regex") else "text", piece, any_case)


def _literal(node: Mapping[str, Any]) -> str:
    literal = node.get("literal", {})
    return str(literal.get("text", "")) if literal.get("kind") == "STRING" else ""


def _require_named(rows: pl.DataFrame, condition: Condition) -> None:
    """Raise BadCondition where no row has a named reward or metric that a condition speaks of."""
    for kind, name in condition.named:
        texts = rows[_NAMED[kind][0]].unique().to_list()
        known = sorted({each for text in texts for each in parse_object(text)})
        if name not in known and rows.height:
            near = ", ".join(nearest(name, known)) or "none"
            raise BadCondition(f"no rollout has a {kind} named {name!r}; the nearest are: {near}")


def _unknown_column(name: str, text: str) -> BadCondition:
    near = ", ".join(nearest(name.lower(), SCHEMA))
    return _refusal(f"{text!r}: there is no column {name!r}{f'; the nearest are {near}' if near else ''}")


def _refusal(what: str) -> BadCondition:
    return BadCondition(
        f'{what}\nThe columns of rollouts are: {", ".join(SCHEMA)}, and "reward:NAME" and "metric:NAME". Text stands '
        f"in single quotes.\nSay for example {EXAMPLE}"
    )
