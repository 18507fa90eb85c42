"""From a row to a task: which columns hold what, and what must be true of them."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from own_data.errors import DataUnusable

Row = Mapping[str, Any]
ROLES = frozenset({"system", "user", "assistant"})
MAX_DEPTH = 200
"""Nested lists and objects of a row; pydantic serialises 255 levels, some of which are around the row."""


def examples(
    rows: Iterable[tuple[str, Row]], prompt: str, answer: str, id_column: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place, and prompt, answer, row and key of each row; columns of these names hold prompt, answer and id.

    The key is the id, if there is one, and a digest of the row: another answer under one id is another example.
    Raises DataUnusable naming place and column: of a missing or empty column, of messages in another form, of an id
    that comes twice, or where there is no row at all.
    """
    places: dict[str, str] = {}
    place = ""
    for place, row in rows:
        name = _text(place, row, id_column) if id_column else ""
        if name and name in places:
            raise DataUnusable(f"{place}, column {id_column!r}: id {name!r} was in {places[name]} already")
        places[name] = place
        yield place, _example(place, name, row, prompt, answer)
    if not place:
        raise DataUnusable("the data holds no rows")


def _example(place: str, name: str, row: Row, prompt_column: str, answer_column: str) -> dict[str, Any]:
    asked = _value(place, row, prompt_column)
    prompt = asked if isinstance(asked, str) else _messages(f"{place}, column {prompt_column!r}", asked)
    answer = _text(place, row, answer_column)
    content = json.dumps(row, sort_keys=True, default=str)  # dates and the like become text
    _require_characters(place, content)
    _require_depth(place, content)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    key = "-".join(filter(None, (name, digest)))
    return {"key": key, "prompt": prompt, "answer": answer, "row": json.loads(content)}


def _value(place: str, row: Row, column: str) -> Any:
    if column not in row:
        near = "".join(f"; did you mean {name!r}?" for name in get_close_matches(column, row, 1))
        raise DataUnusable(f"{place}: there is no column {column!r}; it has {', '.join(sorted(row)) or 'none'}{near}")
    if row[column] is None or (isinstance(row[column], str) and not row[column].strip()):
        raise DataUnusable(f"{place}: column {column!r} is empty")
    return row[column]


def _text(place: str, row: Row, column: str) -> str:
    where, value = f"{place}, column {column!r}", _value(place, row, column)
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
