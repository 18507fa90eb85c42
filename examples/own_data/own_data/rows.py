"""From a row to a task: which columns hold what, and what must be true of them."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from own_data.errors import DataUnusable

Row = Mapping[str, Any]
ROLES = frozenset({"system", "user", "assistant"})
MAX_DEPTH = 200
"""Nested lists and objects of a row; pydantic serialises 255 levels, some of which are around the row."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a row hold what."""

    prompt: str
    answer: str
    id: str = ""


@dataclass(frozen=True)
class Example:
    """What a row says."""

    place: str
    """Where the row stands, for messages."""
    key: str
    """The row's id, and a digest of what is in the row: another answer under the same id is another example."""
    prompt: str | list[dict[str, str]]
    """The user's text, or chat messages."""
    answer: str
    """What the reply is compared with."""
    row: Row
    """All columns, as JSON values, for scoring functions."""


def examples(rows: Iterable[tuple[str, Row]], columns: Columns) -> Iterator[Example]:
    """Yield the examples of `rows`.

    Raises DataUnusable naming place and column: of a missing or empty column, of messages in another form, of an id
    that comes twice, or where there is no row at all.
    """
    places: dict[str, str] = {}
    place = ""
    for place, row in rows:
        name = _text(f"{place}, column {columns.id!r}", _value(place, row, columns.id)) if columns.id else ""
        if name and name in places:
            raise DataUnusable(f"{place}, column {columns.id!r}: id {name!r} was in {places[name]} already")
        places[name] = place
        yield _example(place, name, row, columns)
    if not place:
        raise DataUnusable("the data holds no rows")


def _example(place: str, name: str, row: Row, columns: Columns) -> Example:
    asked = _value(place, row, columns.prompt)
    prompt = asked if isinstance(asked, str) else _messages(f"{place}, column {columns.prompt!r}", asked)
    answer = _text(f"{place}, column {columns.answer!r}", _value(place, row, columns.answer))
    content = json.dumps(row, sort_keys=True, default=str)  # dates and the like become text
    _require_characters(place, content)
    _require_depth(place, content)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Example(place, "-".join(filter(None, (name, digest))), prompt, answer, json.loads(content))


def _value(place: str, row: Row, column: str) -> Any:
    if column not in row:
        raise DataUnusable(f"{place}: there is no column {column!r}; it has {', '.join(sorted(row)) or 'none'}")
    if row[column] is None or (isinstance(row[column], str) and not row[column].strip()):
        raise DataUnusable(f"{place}: column {column!r} is empty")
    return row[column]


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str | int | float | Decimal) or isinstance(value, bool):
        raise DataUnusable(f"{where}: a text or a number is wanted, this is {type(value).__name__}")
    if not isinstance(value, str) and not math.isfinite(value):
        raise DataUnusable(f"{where}: a text or a number is wanted, this is {value}")
    return str(value)


def _require_characters(place: str, content: str) -> None:
    """Refuse half a character, which JSON can write and nothing can send; `content` is JSON in ASCII."""
    if "\\ud" not in content:
        return
    try:
        json.dumps(json.loads(content), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataUnusable(f"{place}: half a character, {error.object[error.start]!a}, is no text") from error


def _require_depth(place: str, content: str) -> None:
    """Refuse lists and objects that are nested deeper than the environment's server can send."""
    if content.count("[") + content.count("{") <= MAX_DEPTH:
        return
    values, depth = [json.loads(content)], 0
    while values:
        depth += 1
        if depth > MAX_DEPTH:
            raise DataUnusable(f"{place}: lists and objects are nested more than {MAX_DEPTH} deep")
        nested = [value.values() if isinstance(value, dict) else value for value in values]
        values = [item for items in nested for item in items if isinstance(item, dict | list)]


def _messages(where: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise DataUnusable(f"{where}: a text or a list of messages is wanted, this is {type(value).__name__}")
    messages = []
    for number, message in enumerate(value):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise DataUnusable(
                f"{where}, message {number}: want a role, one of {', '.join(sorted(ROLES))}, and a text as content"
            )
        if message.get("tool_calls"):
            raise DataUnusable(f"{where}, message {number}: it calls tools, and there are none here")
        messages.append({"role": role, "content": content})
    if not messages or messages[-1]["role"] != "user":
        raise DataUnusable(f"{where}: the last message must be the user's, for the model to answer")
    return messages
