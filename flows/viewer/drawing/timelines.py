"""The timeline of a run: when each stage of each step began and ended, so that what overlaps is seen."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from flows.viewer.drawing.scales import Scale
from flows.viewer.drawing.svg import colour, drawing, link, short, tag, text, title
from flows.viewer.words import seconds

WIDTH, LEFT, RIGHT = 1320.0, 142.0, 14.0
ROW, GAP, TOP, BOTTOM = 15.0, 7.0, 30.0, 24.0


def timeline(told: Mapping[str, Any], addresses: Mapping[str, str]) -> Markup:
    """Return lanes of bars, each a link to its step; `told` is as `data.timeline_lanes.lanes` gives it.

    `addresses` are those of steps and, under `v` and the version, of evaluations. A lane's `colour` is its number.
    """
    x = Scale(0.0, told["length"], LEFT, WIDTH - RIGHT)
    top, parts = TOP, []
    for lane in told["lanes"]:
        parts.append(_lane(lane, x, top, addresses))
        top += lane["rows"] * ROW + GAP
    grid = [tag("path", d=f"M{short(x.at(each['at']))} {short(TOP - 4)}V{short(top)}") for each in told["ticks"]]
    below = [
        text(x.at(each["at"]), top + 15, _elapsed(each["seconds"]), text_anchor="middle") for each in told["ticks"]
    ]
    marks = _events(told, x, top) + _cuts(told, x, top)
    body = [tag("g", *grid, class_="grid"), tag("g", *below, class_="ticks"), *parts, *marks]
    return drawing(
        WIDTH, top + BOTTOM, body, class_="timeline", role="group", aria_label="Work of the run by stage over time"
    )


def _lane(lane: Mapping[str, Any], x: Scale, top: float, addresses: Mapping[str, str]) -> str:
    name = text(LEFT - 10, top + ROW / 2 + 3.5, lane["stage"].replace("_", " "), text_anchor="end", class_="name")
    bars = "".join(_bar(bar, lane["stage"], x, top + bar["row"] * ROW, addresses) for bar in lane["bars"])
    return name + tag("g", bars, class_=colour(lane["colour"]))


def _bar(bar: Mapping[str, Any], stage: str, x: Scale, top: float, addresses: Mapping[str, str]) -> str:
    start, width = x.at(bar["start"]), max(1.2, x.at(bar["end"]) - x.at(bar["start"]))
    evaluated = stage.startswith("evaluation")
    what = f"policy {bar['step']}" if evaluated else f"step {bar['step']}"
    tokens = f", {bar['tokens']:,} tokens" if bar["tokens"] else ""
    unfinished = "" if bar["finished"] else ", in parts so far"
    told = f"{what}: {stage.replace('_', ' ')}, {seconds(bar['seconds'])}{tokens}{unfinished}, key {bar['key'][:8]}"
    shades = f"bar{' odd' if bar['step'] % 2 else ''}{'' if bar['finished'] else ' unfinished'}"
    rect = tag("rect", title(told), x=start, y=top, width=width, height=ROW - 2, rx="2", class_=shades)
    room = width > 8 + 6 * len(str(bar["step"]))
    number = text(start + width / 2, top + ROW / 2 + 3, str(bar["step"]), text_anchor="middle") if room else ""
    address = addresses.get(f"v{bar['step']}" if evaluated else str(bar["step"]))
    return link(address, rect, number, aria_label=told, tabindex="-1") if address else rect + number


def _events(told: Mapping[str, Any], x: Scale, bottom: float) -> list[str]:
    """Return a line for each event of the run, with its name where there is room."""
    found, free = [], 0.0
    for event in told["events"]:
        at = x.at(event["at"])
        look = f"event {event['look']}"
        line = tag("path", title(event["event"]), d=f"M{short(at)} {short(TOP - 12)}V{short(bottom)}", class_="stem")
        words = ""
        if at >= free:
            near = at > WIDTH - 90
            words = text(at + (-3 if near else 3), TOP - 15, event["event"], text_anchor="end" if near else "start")
            free = at + 7 * len(event["event"]) + 12
        found.append(tag("g", line, words, class_=look))
    return found


def _cuts(told: Mapping[str, Any], x: Scale, bottom: float) -> list[str]:
    return [
        tag(
            "path",
            title(f"nothing was done for {seconds(cut['seconds'])}"),
            d=f"M{short(x.at(cut['at']))} {short(TOP - 4)}V{short(bottom)}",
            class_="cut",
        )
        for cut in told["cuts"]
    ]


def _elapsed(value: float) -> str:
    """Return seconds since the begin, short enough for an axis."""
    if value < 120:
        return f"{value:g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min" if not rest else f"{minutes}:{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h" if not minutes else f"{hours} h {minutes:02d}"
