"""A run as SVG: charts by step, sparklines, its ledger (steps across, stages down) and its timeline.

A chart is plain values: `title`, `series` (each `name`, `values` by step with None for a gap, perhaps `low` and `high`
for a band or an interval, perhaps `kind`: line, points or bars), `zero` to begin at zero, `wide` for one that has the
page to itself, `across` for what is counted across where it is no step. The steps that it is drawn
over are the same for all charts of a page, so that a cursor can stand at the same step in all of them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from markupsafe import Markup

from flows.reporting.curve import Steps, grid, series_svg
from flows.reporting.formats import seconds, visible
from flows.reporting.svg import (
    NUM_COLOURS,
    Scale,
    around,
    colour,
    is_drawn,
    label,
    link,
    quote,
    short,
    svg_document,
    tag,
    text,
    thin,
    ticks,
    title,
)
from tasks.stages import EVALUATION

WIDTH, HEIGHT = 440.0, 172.0
WIDE = 900.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 10.0, 24.0
BESIDE = 5.0
Chart = Mapping[str, Any]


def chart(drawn: Chart, steps: Steps) -> Markup:
    """Return a chart over steps; what was drawn lately is not drawn again: most charts are looked at more than once."""
    # Dictionaries cannot be keys of a cache; their JSON can, and is made far quicker than a drawing.
    own = {name: value for name, value in drawn.items() if name != "steps"}  # which are given beside it
    return _chart_once(json.dumps((own, steps)))


@lru_cache(maxsize=256)
def _chart_once(arguments: str) -> Markup:
    return _picture(*json.loads(arguments))


def _picture(drawn: Chart, steps: Steps) -> Markup:
    series = drawn["series"]
    width, height = WIDE if drawn.get("wide") else (WIDTH, HEIGHT)
    if drawn.get("over"):
        return _scatter(drawn)
    places = thin([each["values"] for each in series]) if not any("steps" in each for each in series) else []
    x, y = _across([*steps, *(step for each in series for step in each.get("steps", ()))], width), _up(drawn, height)
    if drawn.get("cells"):
        least, most = drawn["range"]
        y = Scale(least, most, height - BOTTOM, TOP) if least < most else y
    parts = [grid(x, y, drawn.get("across", "step"))]
    left = drawn.get("exit")
    for at in [x.at(each.get("x", each["step"])) for each in steps if left and each["step"] == left["step"]]:
        parts.append(tag("path", d=f"M{short(at)} {short(y.begin)}V{short(y.end)}", class_="exit"))
    if drawn.get("cells"):
        parts.append(_heat(drawn, steps, x, y))
    elif series and series[0].get("kind") == "bars":
        parts.append(_bars(series, steps, places, x, y))
    else:
        # Points of several series stand side by side around their step, or they would hide each other.
        middle = (len(series) - 1) / 2
        for n, each in enumerate(series):
            of = each.get("steps", steps)
            own = thin([each["values"]]) if "steps" in each else places
            if each.get("raw"):
                parts.append(tag("g", series_svg(n, {**each, "values": each["raw"]}, of, own, x, y), class_="raw"))
            parts.append(series_svg(n, each, of, own, x, y, BESIDE * (n - middle)))
    parts.append(tag("g", class_="cursor"))
    return svg_document(
        width,
        height,
        (tag("desc", text_of(drawn, steps)), *parts),
        class_="chart",
        role="group",
        tabindex="0",
        aria_label=f"{drawn['title']}, by step",
        data_chart=_values(drawn, steps, places, x, y),
    )


def _scatter(drawn: Chart) -> Markup:
    """Return a point for each step, in five shades by age: a stroke without a length is round, and weighs little."""
    points = [p for p in zip(drawn["over"], drawn["series"][0]["values"], strict=True) if all(map(is_drawn, p))]
    x = Scale(*around(a for a, _ in points), LEFT, WIDTH - RIGHT)
    y = Scale(*around(b for _, b in points), HEIGHT - BOTTOM, TOP)
    parts = [grid(x, y, drawn["across"])]
    for age in range(5):
        own = points[len(points) * age // 5 : len(points) * (age + 1) // 5]
        dots = "".join(f"M{short(x.at(a))} {short(y.at(b))}h0" for a, b in own)
        parts.append(tag("path", d=dots, class_=f"cloud age{age} s0"))
    return svg_document(WIDTH, HEIGHT, parts, class_="chart", role="img", aria_label=drawn["title"])


def _heat(drawn: Chart, steps: Steps, x: Scale, y: Scale) -> str:
    """Return cells in five shades, by their share of a column; of many steps several share a column."""
    shades, times, most = [""] * 5, -(-len(steps) // 100), y.at(y.low)
    ends = [x.at(each.get("x", each["step"])) for each in steps]
    height = (y.begin - y.end) / max(len(drawn["cells"][0]), 1)
    for place in range(0, len(steps), times):
        column = [sum(own) for own in zip(*drawn["cells"][place : place + times], strict=True)]
        after = ends[place + times] if place + times < len(ends) else x.end
        for up, count in enumerate(column):
            if count:
                shade = min(4, int(10 * count / sum(column)))
                corner = f"M{short(ends[place])} {short(most - up * height)}"
                shades[shade] += f"{corner}H{short(after)}v{short(-height)}H{short(ends[place])}z"
    return "".join(tag("path", d=d, class_=f"heat age{n} s0") for n, d in enumerate(shades) if d)


def text_of(drawn: Chart, steps: Steps) -> str:
    """Return what a chart shows in words, escaped."""
    descriptions = []
    for each in drawn["series"]:
        of = each.get("steps", steps)
        known = [(value, of[place]["step"]) for place, value in enumerate(each["values"]) if value is not None]
        if known:
            (first, begun), (last, ended) = known[0], known[-1]
            descriptions.append(f"{each['name']}: {first:.4g} at step {begun}, {last:.4g} at step {ended}")
    return quote("; ".join(descriptions))


def _across(steps: Steps, width: float) -> Scale:
    numbers = [each.get("x", each["step"]) for each in steps] or [0]
    low, high = min(numbers), max(numbers)
    # Half a step at least, so that the first and the last bar are not cut.
    room = 0.5 if high == low else max(0.5, (high - low) * 0.01)
    return Scale(low - room, high + room, LEFT, width - RIGHT)


def _up(drawn: Chart, height: float) -> Scale:
    series = drawn["series"]
    if series and series[0].get("kind") == "bars":
        sums = [sum(value or 0.0 for value in own) for own in zip(*(each["values"] for each in series), strict=True)]
        return Scale(*around(sums, zero=True), height - BOTTOM, TOP)
    names = ("values", "low", "high", "raw")
    known = [value for each in series for name in names for value in each.get(name) or () if value is not None]
    if drawn.get("log") and (above := [value for value in known if value > 0 and math.isfinite(value)]):
        return Scale(min(above) / 1.1, max(above) * 1.1, height - BOTTOM, TOP, log=True)
    return Scale(*around(known, drawn.get("zero", False)), height - BOTTOM, TOP)


def _bars(series: Sequence[Mapping[str, Any]], steps: Steps, places: Sequence[int], x: Scale, y: Scale) -> str:
    """Return bars of all series on top of each other, from the first up."""
    width = max(1.0, min(26.0, 0.8 * (x.end - x.begin) / max(1.0, x.high - x.low)))
    parts = []
    for number, each in enumerate(series):
        bars = []
        for place in places:
            value = each["values"][place]
            below = sum(other["values"][place] or 0.0 for other in series[:number])
            if value is not None and math.isfinite(value) and math.isfinite(below):
                top, foot = y.at(below + value), y.at(below)
                at = x.at(steps[place].get("x", steps[place]["step"])) - width / 2
                # Whatever is there is seen: 0.2 units are a hair line.
                bars.append(tag("rect", x=at, y=top, width=width, height=max(0.2, foot - top)))
        parts.append(tag("g", *bars, class_=f"bar {each.get('colour') or colour(number)}"))
    return "".join(parts)


def _values(drawn: Chart, steps: Steps, places: Sequence[int], x: Scale, y: Scale) -> str:
    """Return what the cursor shows, as JSON: places across, steps, and every value."""
    cursor_data = {
        **_cursor_places(steps, places, x),
        "y": [y.low, y.high, y.begin, y.end],
        "log": y.log,
        "unit": drawn.get("unit", ""),
        "across": drawn.get("across", "step"),
        "to": _address_of_steps(steps),
        "series": [
            {
                "name": visible(each["name"]),
                "values": [_json_number(each["values"][place]) for place in own],
                "kind": each.get("kind"),
            }
            | (_cursor_places(each["steps"], own, x) if "steps" in each else {})
            | ({"colour": each["colour"]} if each.get("colour") else {})
            for each in drawn["series"]
            for own in [thin([each["values"]]) if "steps" in each else places]
        ],
    }
    if not cursor_data["x"] and cursor_data["series"]:  # of several runs: the cursor goes along the first
        cursor_data |= {name: cursor_data["series"][0].get(name, []) for name in ("x", "steps")}
    return json.dumps(cursor_data, separators=(",", ":"), allow_nan=False)


def _cursor_places(steps: Steps, places: Sequence[int], x: Scale) -> dict[str, Any]:
    across = [round(x.at(steps[place].get("x", steps[place]["step"])), 1) for place in places]
    return {"x": across, "steps": [steps[place]["step"] for place in places]}


def _address_of_steps(steps: Steps) -> str | None:
    """Return what stands before the number in the addresses of the steps; None where they have none."""
    first = steps[0] if steps else {}
    return str(first["address"]).removesuffix(str(first["step"])) if first.get("address") else None


def _json_number(value: float | None) -> float | str | None:
    # Five digits are more than a tip shows, and keep a page of many charts small.
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.5g}")
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


SPARK_WIDTH, SPARK_HEIGHT, SPARK_MARGIN = 132.0, 28.0, 3.0
MOST_SPARK_POINTS = 50


def sparkline(values: Sequence[float | None], title: str) -> Markup:
    """Return a small line of values, with gaps where there are none and a dot at the last; nothing without values."""
    return _spark(tuple(values), title)


@lru_cache(maxsize=1024)
def _spark(values: tuple[float | None, ...], title: str) -> Markup:
    places = [place for place in thin([list(values)], MOST_SPARK_POINTS) if is_drawn(values[place])]
    if not places:
        return Markup("")
    known = [(place, values[place] or 0.0) for place in places]
    x = Scale(0, max(1, len(values) - 1), SPARK_MARGIN, SPARK_WIDTH - SPARK_MARGIN)
    y = Scale(*around([value for _, value in known]), SPARK_HEIGHT - SPARK_MARGIN, SPARK_MARGIN)
    steps = ""
    for number, (place, value) in enumerate(known):
        gap = number == 0 or any(not is_drawn(values[each]) for each in range(known[number - 1][0] + 1, place))
        steps += f"{'M' if gap else 'L'}{short(x.at(place))} {short(y.at(value))}"
    last, value = known[-1]
    dot = tag("circle", cx=x.at(last), cy=y.at(value), r="2.2", class_="dot")
    body = tag("g", tag("path", d=steps, class_="line"), dot, class_="s0")
    return svg_document(SPARK_WIDTH, SPARK_HEIGHT, [body], class_="spark", role="img", aria_label=title)


STAGES_LEFT, LEDGER_TOP, LEDGER_BOTTOM, LEDGER_ROW = 142.0, 4.0, 20.0, 18.0
LEAST_COLUMN, MOST_COLUMN, LEDGER_WIDTH = 4.0, 26.0, 1110.0
"""Least and most of a column, and what all of them take where there are few enough."""
MOST_USERS = 6
MOST_COLUMNS = 200
"""Of more steps, neighbours that look alike are drawn as one column."""


def ledger(table: Mapping[str, Any], addresses: Mapping[str, str]) -> Markup:
    """Return a grid, each column a link to its step; `table` is what `flows.queries.ledger.ledger` returns."""
    columns, stages = table["columns"], table["stages"]
    width = max(LEAST_COLUMN, min(MOST_COLUMN, LEDGER_WIDTH / max(1, len(columns))))
    height = LEDGER_TOP + LEDGER_ROW * len(stages)
    names = [_stage_name(stage, LEDGER_TOP + LEDGER_ROW * (row + 0.5)) for row, stage in enumerate(stages)]
    cells = []
    for _, alike in groupby(enumerate(columns), lambda each: _looks(*each) if len(columns) > MOST_COLUMNS else each[0]):
        (place, column), *more = alike
        last, across = (more or [(place, column)])[-1][1]["step"], width * (1 + len(more))
        drawn = _column(column, last, stages, table["runs"], STAGES_LEFT + width * place, across)
        cells.append(link(addresses.get(str(column["step"])), *drawn, tabindex="-1"))
    body = [*names, *cells, tag("g", *_step_numbers(columns, width, height), class_="ticks")]
    across, down = STAGES_LEFT + width * len(columns) + 6, height + LEDGER_BOTTOM
    named = "Slices by step and stage"
    return svg_document(across, down, body, class_="ledger", role="group", aria_label=named, width=across, height=down)


def _stage_name(stage: str, middle: float) -> str:
    """Return the name of a stage at the left of its row."""
    return text(STAGES_LEFT - 10, middle + 3.5, stage.replace("_", " "), text_anchor="end", class_="name")


def cell_class(by: int) -> str:
    """Return the class of what a run computed, by its number in the ledger's runs: own work is the first."""
    return "s0" if by == 0 else f"s{1 + (by - 1) % (NUM_COLOURS - 1)}"


def _looks(place: int, column: Mapping[str, Any]) -> list[object]:
    return [cell and (cell["by"], cell["finished"]) for cell in column["cells"]]


def _column(
    column: Mapping[str, Any], last: int, stages: Sequence[str], runs: Sequence[str], at: float, width: float
) -> list[str]:
    """Return the cells of a step, or of those to the `last` like it, from top to bottom; empty ones if not begun."""
    cells = column["cells"] or [None] * len(stages)
    # An evaluation is of the policy before the step, so it says nothing about whether the step has begun.
    begun = any(cell for stage, cell in zip(stages, cells, strict=True) if stage != EVALUATION)
    after = bool(column["cells"]) and not begun  # the last policy was evaluated; there is no such step
    # The gap shrinks with the column: narrow columns would be nothing but gap.
    place = {"x": at, "width": width - min(1.5, 0.2 * width), "height": LEDGER_ROW - 2, "rx": "2"}
    found = []
    for row, (stage, cell) in enumerate(zip(stages, cells, strict=True)):
        if cell is None:
            if stage != EVALUATION and not after:  # not every step begins with a policy that is evaluated
                look = "cell missing" if begun else "cell planned"
                found.append(tag("rect", **place, y=LEDGER_TOP + LEDGER_ROW * row, class_=look))
            continue
        shared, unfinished = " shared" if cell["by"] else "", "" if cell["finished"] else " unfinished"
        look = f"cell {cell_class(cell['by'])}{shared}{unfinished}"
        tooltip = title(_cell_title(column["step"], last, stage, cell, runs))
        found.append(tag("rect", tooltip, **place, y=LEDGER_TOP + LEDGER_ROW * row, class_=look))
    return found


def _cell_title(step: int, last: int, stage: str, cell: Mapping[str, Any], runs: Sequence[str]) -> str:
    if last != step:
        return f"steps {step} to {last}, {stage.replace('_', ' ')}: computed by {runs[cell['by']]}"
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
        text(STAGES_LEFT + width * (place + 0.5), height + 14, label(column["step"]), text_anchor="middle")
        for place, column in enumerate(columns)
        if column["step"] in wanted
    ]


TIMELINE_WIDTH, TIMELINE_RIGHT = 1320.0, 14.0
LANE_ROW, LANE_GAP, TIMELINE_TOP, TIMELINE_BOTTOM = 15.0, 7.0, 30.0, 24.0


def timeline(layout: Mapping[str, Any], addresses: Mapping[str, str]) -> Markup:
    """Return lanes of bars, each a link to its step; `layout` is what `flows.queries.ledger.lanes` returns.

    `addresses` are those of steps and, under `v` and the version, of evaluations. A lane's `colour` is its number.
    """
    x = Scale(0.0, layout["length"], STAGES_LEFT, TIMELINE_WIDTH - TIMELINE_RIGHT)
    top, parts = TIMELINE_TOP, []
    for lane in layout["lanes"]:
        parts.append(_lane(lane, x, top, addresses))
        top += lane["rows"] * LANE_ROW + LANE_GAP
    lines, below = [], []
    for each in layout["ticks"]:
        lines.append(tag("path", d=f"M{short(x.at(each['at']))} {short(TIMELINE_TOP - 4)}V{short(top)}"))
        below.append(text(x.at(each["at"]), top + 15, _elapsed_time(each["seconds"]), text_anchor="middle"))
    marks = _events(layout, x, top) + _cuts(layout, x, top)
    body = [tag("g", *lines, class_="grid"), tag("g", *below, class_="ticks"), *parts, *marks]
    named = "Work of the run by stage over time"
    return svg_document(TIMELINE_WIDTH, top + TIMELINE_BOTTOM, body, class_="timeline", role="group", aria_label=named)


def _lane(lane: Mapping[str, Any], x: Scale, top: float, addresses: Mapping[str, str]) -> str:
    bars = "".join(_bar(bar, lane["stage"], x, top + bar["row"] * LANE_ROW, addresses) for bar in lane["bars"])
    return _stage_name(lane["stage"], top + LANE_ROW / 2) + tag("g", bars, class_=colour(lane["colour"]))


def _bar(bar: Mapping[str, Any], stage: str, x: Scale, top: float, addresses: Mapping[str, str]) -> str:
    # Work of milliseconds in a run of days is still to be seen and pointed at.
    start, width = x.at(bar["start"]), max(1.2, x.at(bar["end"]) - x.at(bar["start"]))
    evaluated = stage.startswith("evaluation")
    what = f"policy {bar['step']}" if evaluated else f"step {bar['step']}"
    tokens = f", {bar['tokens']:,} tokens" if bar["tokens"] else ""
    unfinished = "" if bar["finished"] else ", in parts so far"
    description = (
        f"{what}: {stage.replace('_', ' ')}, {seconds(bar['seconds'])}{tokens}{unfinished}, key {bar['key'][:8]}"
    )
    shades = f"bar{' odd' if bar['step'] % 2 else ''}{'' if bar['finished'] else ' unfinished'}"
    rect = tag("rect", title(description), x=start, y=top, width=width, height=LANE_ROW - 2, rx="2", class_=shades)
    # A digit is about 6 units wide; a number that does not fit would cover the neighbours.
    room = width > 8 + 6 * len(str(bar["step"]))
    number = text(start + width / 2, top + LANE_ROW / 2 + 3, str(bar["step"]), text_anchor="middle") if room else ""
    address = addresses.get(f"v{bar['step']}" if evaluated else str(bar["step"]))
    return link(address, rect, number, aria_label=description, tabindex="-1") if address else rect + number


def _events(layout: Mapping[str, Any], x: Scale, bottom: float) -> list[str]:
    """Return a line for each event of the run, with its name where there is room."""
    found, free = [], 0.0
    for event in layout["events"]:
        at = x.at(event["at"])
        stem = f"M{short(at)} {short(TIMELINE_TOP - 12)}V{short(bottom)}"
        line = tag("path", title(event["event"]), d=stem, class_="stem")
        words = ""
        # Names that would overlap are left out: the tooltip of the line shows them.
        if at >= free:
            beside, anchor = (-3, "end") if at > TIMELINE_WIDTH - 90 else (3, "start")
            words = text(at + beside, TIMELINE_TOP - 15, event["event"], text_anchor=anchor)
            free = at + 7 * len(event["event"]) + 12
        found.append(tag("g", line, words, class_=f"event {event['look']}"))
    return found


def _cuts(layout: Mapping[str, Any], x: Scale, bottom: float) -> list[str]:
    top = short(TIMELINE_TOP - 4)
    found = []
    for cut in layout["cuts"]:
        idle = title(f"nothing was done for {seconds(cut['seconds'])}")
        found.append(tag("path", idle, d=f"M{short(x.at(cut['at']))} {top}V{short(bottom)}", class_="cut"))
    return found


def _elapsed_time(value: float) -> str:
    """Return seconds since the begin, short enough for an axis."""
    if value < 120:
        return f"{value:g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min" if not rest else f"{minutes}:{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h" if not minutes else f"{hours} h {minutes:02d}"
