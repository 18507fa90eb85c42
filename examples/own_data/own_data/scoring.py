"""How a reply is compared with the answer: three ways of ours, or a function of your own."""

import importlib
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from typing import Any

from own_data.errors import DataUnusable

MINUS = "\N{MINUS SIGN}"
NUMBER = re.compile(rf"(?:(?<!\w)[-{MINUS}])?(?:(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,9}})?")
CLOSE = 1e-9
"""Numbers with a fraction may differ by so much, relative to the larger one: the same value is written in many ways."""
Score = Callable[..., float | Awaitable[float]]


def exact(reply: str, answer: str, row: Mapping[str, Any] | None = None) -> float:
    """1 where reply and answer are the same text, white space at the ends aside."""
    return float(reply.strip() == answer.strip())


def contains(reply: str, answer: str, row: Mapping[str, Any] | None = None) -> float:
    """1 where the answer stands in the reply, upper and lower case alike."""
    return float(answer.strip().casefold() in reply.casefold())


def number(reply: str, answer: str, row: Mapping[str, Any] | None = None) -> float:
    """1 where the last number of the reply is that of the answer: 1,000 is 1000, and 0.5 is .50."""
    said, wanted = last_number(reply), last_number(answer)
    return float(said is not None and wanted is not None and is_same(said, wanted))


def is_same(first: Decimal, second: Decimal) -> bool:
    """Whether two numbers are one: whole ones exactly, however long, others up to rounding."""
    if first == second or all(each == each.to_integral_value() for each in (first, second)):
        return first == second
    return math.isfinite(float(first)) and math.isclose(float(first), float(second), rel_tol=CLOSE)


def last_number(text: str) -> Decimal | None:
    """The last number of a text, None where it has none. A hyphen after a letter or a digit is no sign."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace(MINUS, "-")) if found else None


SCORES: Mapping[str, Score] = {"exact": exact, "contains": contains, "number": number}


def scoring(name: str) -> Score:
    """Return the function of that name, or of an import path `package.module:function`.

    It is called with the reply, the answer and the row, and returns a number, or something to await for one. Raises
    DataUnusable where there is no such function.
    """
    if name in SCORES:
        return SCORES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise DataUnusable(f"scoring {name!r}: want {', '.join(SCORES)}, or an import path package.module:function")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DataUnusable(f"scoring {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise DataUnusable(f"scoring {name!r} is no function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]
