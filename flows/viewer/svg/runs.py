"""A run as SVG: its ledger, steps across and stages down, and its timeline, when each stage of each step was done."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flows.reporting.formats import seconds
from flows.reporting.svg import NUM_COLOURS, Scale, colour, label, link, short, svg_document, tag, text, ticks, title
from tasks.stages import EVALUATION

LEFT, LEDGER_TOP, LEDGER_BOTTOM, LEDGER_ROW = 142.0, 4.0, 20.0, 18.0
NARROW, WIDE, LEDGER_WIDTH = 4.0, 26.0, 1110.0
"""Least and most of a column, and what all of them take where there are few enough."""
MOST_USERS = 6


def ledger(told: Mapping[str, Any], addresses: Mapping[str, str]) -> Markup:
    """Return the grid that `data.shared.ledger` gives; each column is a link to its step."""
    columns, stages = told["columns"], told["stages"]
    width = max(NARROW, min(WIDE, LEDGER_WIDTH / max(1, len(columns))))
    height = LEDGER_TOP + LEDGER_ROW * len(stages)
    names = [
        text(
            LEFT - 10,
            LEDGER_TOP + LEDGER_ROW * row + LEDGER_ROW / 2 + 3.5,
            stage.replace("_", " "),
            text_anchor="end",
            class_="name",
        )
        for row, stage in enumerate(stages)
    ]
    cells = [
        link(
            addresses.get(str(column["step"])),
            *_column(column, stages, told["runs"], LEFT + width * place, width),
            tabindex="-1",
        )
        for place, column in enumerate(columns)
    ]
    body = [*names, *cells, tag("g", *_step_numbers(columns, width, height), class_="ticks")]
    total = LEFT + width * len(columns) + 6
    return svg_document(
        total,
        height + LEDGER_BOTTOM,
        body,
        class_="ledger",
        role="group",
        aria_label="Slices by step and stage",
        width=total,
        height=height + LEDGER_BOTTOM,
    )


def cell_class(by: int) -> str:
    """Return the class of what a run computed, by its number in the ledger's runs: own work is the first."""
    return "s0" if by == 0 else f"s{1 + (by - 1) % (NUM_COLOURS - 1)}"


def _column(
    column: Mapping[str, Any], stages: Sequence[str], runs: Sequence[str], at: float, width: float
) -> list[str]:
    """Return the cells of a step from top to bottom; of one that is not begun, empty ones."""
    cells = column["cells"] or [None] * len(stages)
    begun = any(cell for stage, cell in zip(stages, cells, strict=True) if stage != EVALUATION)
    after = bool(column["cells"]) and not begun  # the last policy was evaluated; there is no such step
    place = {"x": at, "width": width - min(1.5, 0.2 * width), "height": LEDGER_ROW - 2, "rx": "2"}
    found = []
    for row, (stage, cell) in enumerate(zip(stages, cells, strict=True)):
        if cell is None:
            if stage != EVALUATION and not after:  # not every step begins with a policy that is evaluated
                look = "cell missing" if begun else "cell planned"
                found.append(tag("rect", **place, y=LEDGER_TOP + LEDGER_ROW * row, class_=look))
            continue
        look = (
            f"cell {cell_class(cell['by'])}{' shared' if cell['by'] else ''}{'' if cell['finished'] else ' unfinished'}"
        )
        told = title(_cell_title(column["step"], stage, cell, runs))
        found.append(tag("rect", told, **place, y=LEDGER_TOP + LEDGER_ROW * row, class_=look))
    return found


def _cell_title(step: int, stage: str, cell: Mapping[str, Any], runs: Sequence[str]) -> str:
    rows = ", ".join(f"{count:,} {table}" for table, count in cell["rows"].items() if count) or "no rows"
    by = runs[cell["by"]]
    done = seconds(cell["seconds"]) if cell["finished"] else "in parts so far"
    others = [name for name in cell["used_by"] if name != by]
    more = f" and {len(others) - MOST_USERS} more" if len(others) > MOST_USERS else ""
    users = f"\nused by {', '.join(others[:MOST_USERS])}{more}" if others else ""
    return f"step {step}, {stage.replace('_', ' ')}: {rows}\n{done}, key {cell['key'][:8]}\ncomputed by {by}{users}"


def _step_numbers(columns: Sequence[Mapping[str, Any]], width: float, height: float) -> list[str]:
    if not columns:
        return []
    first, last = columns[0]["step"], columns[-1]["step"]
    wanted = {each for each in ticks(first, last, 12) if each == int(each)}
    return [
        text(LEFT + width * (place + 0.5), height + 14, label(column["step"]), text_anchor="middle")
        for place, column in enumerate(columns)
        if column["step"] in wanted
    ]


TIMELINE_WIDTH, TIMELINE_LEFT, RIGHT = 1320.0, 142.0, 14.0
LANE_ROW, LANE_GAP, TIMELINE_TOP, TIMELINE_BOTTOM = 15.0, 7.0, 30.0, 24.0


def timeline(told: Mapping[str, Any], addresses: Mapping[str, str]) -> Markup:
    """Return lanes of bars, each a link to its step; `told` is as `data.timeline_lanes.lanes` gives it.

    `addresses` are those of steps and, under `v` and the version, of evaluations. A lane's `colour` is its number.
    """
    x = Scale(0.0, told["length"], TIMELINE_LEFT, TIMELINE_WIDTH - RIGHT)
    top, parts = TIMELINE_TOP, []
    for lane in told["lanes"]:
        parts.append(_lane(lane, x, top, addresses))
        top += lane["rows"] * LANE_ROW + LANE_GAP
    grid = [
        tag("path", d=f"M{short(x.at(each['at']))} {short(TIMELINE_TOP - 4)}V{short(top)}") for each in told["ticks"]
    ]
    below = [
        text(x.at(each["at"]), top + 15, _elapsed(each["seconds"]), text_anchor="middle") for each in told["ticks"]
    ]
    marks = _events(told, x, top) + _cuts(told, x, top)
    body = [tag("g", *grid, class_="grid"), tag("g", *below, class_="ticks"), *parts, *marks]
    return svg_document(
        TIMELINE_WIDTH,
        top + TIMELINE_BOTTOM,
        body,
        class_="timeline",
        role="group",
        aria_label="Work of the run by stage over time",
    )


def _lane(lane: Mapping[str, Any], x: Scale, top: float, addresses: Mapping[str, str]) -> str:
    name = text(
        TIMELINE_LEFT - 10, top + LANE_ROW / 2 + 3.5, lane["stage"].replace("_", " "), text_anchor="end", class_="name"
    )
    bars = "".join(_bar(bar, lane["stage"], x, top + bar["row"] * LANE_ROW, addresses) for bar in lane["bars"])
    return name + tag("g", bars, class_=colour(lane["colour"]))


def _bar(bar: Mapping[str, Any], stage: str, x: Scale, top: float, addresses: Mapping[str, str]) -> str:
    start, width = x.at(bar["start"]), max(1.2, x.at(bar["end"]) - x.at(bar["start"]))
    evaluated = stage.startswith("evaluation")
    what = f"policy {bar['step']}" if evaluated else f"step {bar['step']}"
    tokens = f", {bar['tokens']:,} tokens" if bar["tokens"] else ""
    unfinished = "" if bar["finished"] else ", in parts so far"
    told = f"{what}: {stage.replace('_', ' ')}, {seconds(bar['seconds'])}{tokens}{unfinished}, key {bar['key'][:8]}"
    shades = f"bar{' odd' if bar['step'] % 2 else ''}{'' if bar['finished'] else ' unfinished'}"
    rect = tag("rect", title(told), x=start, y=top, width=width, height=LANE_ROW - 2, rx="2", class_=shades)
    room = width > 8 + 6 * len(str(bar["step"]))
    number = text(start + width / 2, top + LANE_ROW / 2 + 3, str(bar["step"]), text_anchor="middle") if room else ""
    address = addresses.get(f"v{bar['step']}" if evaluated else str(bar["step"]))
    return link(address, rect, number, aria_label=told, tabindex="-1") if address else rect + number


def _events(told: Mapping[str, Any], x: Scale, bottom: float) -> list[str]:
    """Return a line for each event of the run, with its name where there is room."""
    found, free = [], 0.0
    for event in told["events"]:
        at = x.at(event["at"])
        look = f"event {event['look']}"
        line = tag(
            "path", title(event["event"]), d=f"M{short(at)} {short(TIMELINE_TOP - 12)}V{short(bottom)}", class_="stem"
        )
        words = ""
        if at >= free:
            near = at > TIMELINE_WIDTH - 90
            words = text(
                at + (-3 if near else 3), TIMELINE_TOP - 15, event["event"], text_anchor="end" if near else "start"
            )
            free = at + 7 * len(event["event"]) + 12
        found.append(tag("g", line, words, class_=look))
    return found


def _cuts(told: Mapping[str, Any], x: Scale, bottom: float) -> list[str]:
    return [
        tag(
            "path",
            title(f"nothing was done for {seconds(cut['seconds'])}"),
            d=f"M{short(x.at(cut['at']))} {short(TIMELINE_TOP - 4)}V{short(bottom)}",
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
