"""SVG text from plain values: whatever is written into it is made visible and escaped here and nowhere else."""

from collections.abc import Iterable

from markupsafe import Markup, escape

from flows.viewer.texts import visible

NUM_COLOURS = 8
"""Classes `s0` to `s7` of the style sheet."""


def colour(number: int) -> str:
    """Return the class that colours the series of a number."""
    return f"s{number % NUM_COLOURS}"


def attributes(**values: object) -> str:
    """Return attributes; None leaves one out, `_` at the end is taken off and any other becomes a dash."""
    shown = ((name.rstrip("_").replace("_", "-"), value) for name, value in values.items() if value is not None)
    return "".join(f' {name}="{quoted(value)}"' for name, value in shown)


def quoted(value: object) -> str:
    """Return a value as it may stand in an attribute or between tags."""
    if isinstance(value, float):
        return short(value)
    return str(escape(visible(value) if isinstance(value, str) else str(value)))


def short(value: float) -> str:
    """Return a place on the page in as few digits as the eye can tell apart."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def tag(name: str, *inside: str, **values: object) -> str:
    """Return an element with what is inside, which is SVG already."""
    body = "".join(inside)
    return f"<{name}{attributes(**values)}>{body}</{name}>" if body else f"<{name}{attributes(**values)}/>"


def text(x: float, y: float, words: str, **values: object) -> str:
    """Return words at a place."""
    return tag("text", quoted(words), x=float(x), y=float(y), **values)


def title(words: str) -> str:
    """Return words that are shown where the pointer rests on what they are in."""
    return tag("title", quoted(words))


def link(address: str | None, *inside: str, **values: object) -> str:
    """Return a link around what is inside; without an address what is inside alone."""
    return tag("a", *inside, href=address, **values) if address else "".join(inside)


def drawing(across: float, down: float, parts: Iterable[str], **values: object) -> Markup:
    """Return the whole drawing, in units of its own; the style sheet, or `width` and `height`, say how large."""
    return Markup(tag("svg", *parts, viewBox=f"0 0 {short(across)} {short(down)}", **values))
