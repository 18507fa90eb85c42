"""Words: numbers, times and lengths as a person reads them. None is a dash everywhere, never a zero."""

import json
import math
from datetime import UTC, datetime
from typing import Any

from flows.viewer.texts import one_line

DASH = "\u2013"


def number(value: float | int | None, digits: int = 3) -> str:
    """A number in few digits: thousands apart, small ones by their power of ten."""
    if value is None or isinstance(value, str):
        return value or DASH
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}".replace(",", "\u202f")  # a narrow space: neither a point nor a comma everywhere
    if abs(value) >= 1000 or round(abs(value)) >= 10**digits:  # else Python would write a power of ten
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.{digits}g}"


def signed(value: float | None, digits: int = 3) -> str:
    """A number with its sign, also a positive one's."""
    if value is None or isinstance(value, str):
        return value or DASH
    return ("+" if value > 0 else "") + number(value, digits)


def share(value: float | None) -> str:
    """A share of one in per cent."""
    if value is None:
        return DASH
    if value in (0, 1) or 0.1 <= abs(value) <= 0.99 or abs(value) >= 10 or not math.isfinite(value):
        return f"{100 * value:.0f} %"
    # Few digits, but almost all is not all.
    if abs(value) < 0.1:
        return f"{100 * value:.2g} %"
    return f"{100 * value:.1f}".removesuffix(".0") + " %" if round(100 * value, 1) != 100 else f"{100 * value:.5g} %"


def seconds(value: float | None) -> str:
    """A time span in the unit that fits it."""
    if value is None:
        return DASH
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def moment(value: str | datetime | None) -> str:
    """A moment to the second, in UTC."""
    if not value:
        return DASH
    when = datetime.fromisoformat(value) if isinstance(value, str) else value
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def short(value: str | None, most: int = 8) -> str:
    """The first characters of a key or an id, by which commands know it too."""
    return DASH if value is None else value[:most]


def line(value: str | None, most: int = 120) -> str:
    """A text on one line, cut."""
    return DASH if value is None else one_line(value, most)


def pretty(value: Any) -> str:
    """JSON, or what was read of it, laid out over lines; text that is no JSON stays as it is."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return str(value)
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except RecursionError:
        return str(value)


def count(value: float | None) -> str:
    """How many there are, large numbers in thousands, millions or billions."""
    return DASH if value is None else _scaled(value, 1000.0, ("", " k", " M", " G"))


def size(value: float | None) -> str:
    """Bytes in the unit that fits them."""
    return DASH if value is None else _scaled(value, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    unit, rest = 0, float(value)
    while rest >= (base if unit else 10 * base) and unit < len(units) - 1:
        rest, unit = rest / base, unit + 1
    return f"{rest:.0f}{units[unit]}" if unit == 0 or rest >= 100 else f"{rest:.3g}{units[unit]}"


def written(value: Any) -> str:
    """A setting as a config file has it: text in quotes, nothing as null."""
    return json.dumps(value, ensure_ascii=False, default=str)


FILTERS = {
    each.__name__: each for each in (number, signed, share, seconds, moment, short, line, pretty, count, size, written)
}
"""By the names that templates know them by."""
