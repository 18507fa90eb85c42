"""PageRequest: what a page or a program asks of a store, and the errors that report mistakes in it."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from threading import Event
from typing import Any
from urllib.parse import urlencode

MOST = 80
"""Characters of a wrong value that an error repeats."""


class NotThere(ValueError):
    """What an address names is not in the store."""


class BadQuestion(ValueError):
    """An address asks in a way that cannot be answered."""


@dataclass(frozen=True)
class PageRequest:
    """An address, taken apart: what its path names, and what comes after the question mark."""

    address: str
    """The path without the question."""
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    from_other_site: bool = False
    """Whether a page of another site sent the browser to this address: then no condition is evaluated."""
    reader_gone: Event = field(default_factory=Event, compare=False)
    """Set once the client has closed the connection."""

    def text(self, name: str, default: str = "") -> str:
        """A value of the question as it was written."""
        return self.query.get(name, default)

    def flag(self, name: str) -> bool:
        """Whether a yes is given: `name=1`; an empty value or 0 is no."""
        return self.text(name) not in ("", "0")

    def number(self, name: str, default: int, least: int = 0, most: int = 2**31) -> int:
        """A whole number of the question, within its bounds. Raises BadQuestion where it is none."""
        text = self.text(name)
        number = _digits(text) if text else default
        if number is None or (text and not least <= number <= most):
            raise BadQuestion(f"{name}={text[:MOST]!r} is no whole number from {least} to {most}")
        return number

    def required_number(self, name: str) -> int:
        """A whole number of the path: a step, a row. Raises NotThere where it is none."""
        number = _digits(self.path[name])
        if number is None:
            raise NotThere(f"{name} {self.path[name][:MOST]!r} is no number: write it in digits")
        return number

    def one_of(self, name: str, known: Sequence[str], default: str = "") -> str:
        """A value out of those known. Raises BadQuestion, which names them, where it is another."""
        value = self.text(name) or default
        if value not in known and value != default:
            raise BadQuestion(f"{name}={value[:MOST]!r} is not known; there are {', '.join(known)}")
        return value

    def but(self, **changes: str | int | None) -> str:
        """The same address with some values of its question changed; None takes one out."""
        # A link leads to a page, also out of the JSON of one.
        values = {**self.query, **changes, "format": None}
        kept = {name: value for name, value in values.items() if value not in (None, "")}
        return self.address + (f"?{urlencode(kept)}" if kept else "")


def _digits(text: str) -> int | None:
    # Bounded before it is read: digits of other scripts are decimal too, and int() is slow over very many.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None


def nearest_numbers(numbers: Iterable[int], to: int) -> str:
    """Return the five numbers that are nearest to one, in a line; empty where there is none."""
    return ", ".join(map(str, sorted(numbers, key=lambda number: (abs(number - to), number))[:5]))


def plain(value: Any) -> Any:
    """Return a value as JSON has it: moments as ISO text, numbers that are not finite by their names."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value.isoformat() if isinstance(value, datetime) else value


def parse_object(text: str | None) -> dict[str, Any]:
    """Return what is said by name in JSON, nothing where it is no such thing: others wrote it."""
    try:
        read = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
