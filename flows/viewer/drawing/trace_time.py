"""The time of a rollout as a bar: set-up, generation with the model's share of it, scoring."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flows.viewer.drawing.svg import drawing, tag
from flows.viewer.words import seconds

WIDTH, HEIGHT, GAP = 320.0, 16.0, 1.0
LEAST = 1.5
"""Width of a span that took any time."""


def trace_time(spans: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a bar whose parts are as long as the spans took; nothing where none took any time."""
    whole = sum(each["seconds"] for each in spans)
    if not whole > 0:
        return Markup("")
    parts, at = [], 0.0
    for each in spans:
        width = max(LEAST, WIDTH * each["seconds"] / whole) if each["seconds"] > 0 else 0.0
        parts.append(_bar(each["name"], each["seconds"], at, width))
        inside = each["inside"]
        if inside and each["seconds"] > 0:
            share = min(inside["seconds"] / each["seconds"], 1.0)
            parts.append(_bar(inside["name"], inside["seconds"], at, width * share))
        at += width
    told = ", ".join(f"{each['name']} {seconds(each['seconds'])}" for each in spans)
    return drawing(max(at, WIDTH), HEIGHT, parts, class_="trace-time", role="img", aria_label=told)


def _bar(name: str, length: float, at: float, width: float) -> str:
    title = tag("title", f"{name}: {seconds(length)}")
    return tag("rect", title, x=at, y=0.0, width=max(width - GAP, 0.5), height=HEIGHT, class_=name) if width else ""
