"""Drawings of pages: a chart's figures for charts.js, which draws them by uPlot, and small pictures as plain values.

Templates lay the pictures out as SVG. Colours are names of the style sheet, which light and dark share.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from markupsafe import Markup

from flows.reporting.formats import number, one_line, seconds, visible
from flows.reporting.svg import NUM_COLOURS, Scale, around, diverging, is_drawn, sequential, short, thin
from tasks.stages import EVALUATION

Chart = Mapping[str, Any]
Steps = Sequence[Mapping[str, Any]]
"""By step: `step`, perhaps `address`."""
MOST_COLUMNS = 100
"""Columns of a heat map: counts of neighbouring steps are added up beyond."""
LISTS = ("values", "low", "high", "raw")
"""What a series may have by step."""


def chart(drawn: Chart, steps: Steps) -> Markup:
    """Return a chart's box: a sentence, and the figures by which charts.js draws it.

    A chart has `title` and `series`, each with `name` and `values` by step, None for a gap; perhaps with `low` and
    `high` for a band or an interval, `kind` (points, bars), and `steps` of its own. `zero` begins at zero, `across` is
    what is counted across. `over` are the places of a scatter, `cells` the counts of a heat map between `range`, which
    are added up for neighbouring steps where there are many.
    """
    several = any("steps" in one for one in drawn["series"])
    every = -(-len(steps) // MOST_COLUMNS)
    places = [] if several else thin([one["values"] for one in drawn["series"]])
    if drawn.get("cells"):
        places = [*range(0, len(steps), every)]
    by_step = [steps[place] for place in places]
    figures = {
        **{name: drawn.get(name, default) for name, default in (("unit", ""), ("across", "step"), ("range", None))},
        **{name: bool(drawn.get(name)) for name in ("log", "zero")},
        **_along(by_step),
        **_addresses(by_step),
        "exit": next((_x(each) for each in steps if drawn.get("exit") and each["step"] == drawn["exit"]["step"]), None),
        "cells": [_sum_counts(drawn["cells"][place : place + every]) for place in places]
        if drawn.get("cells")
        else None,
        "dots": _scatter(drawn, steps) if drawn.get("over") else None,
        "series": [_series(n, one, places) for n, one in enumerate(drawn["series"])],
    }
    return _box(figures, f"{drawn['title']}, by step", text_of(drawn, steps), "wide" * bool(drawn.get("wide")))


def attempts_chart(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return attempts at an example as dots by step, each leading to its trace; those of one step beside each other.

    `rows` have step, reward (None for none), error_class, for_training, here, trace_id and address.
    """
    counts, seen = Counter(each["step"] for each in rows), Counter[int]()
    dots = []
    for each in rows:
        step, seen[each["step"]] = each["step"], seen[each["step"]] + 1
        where = f"step {step}" if each["for_training"] else f"evaluation of policy {step}"
        reward = "no reward" if each["reward"] is None else f"reward {each['reward']:.4g}"
        dots.append(
            {
                "x": step + 0.8 * (seen[step] - (counts[step] + 1) / 2) / counts[step],
                "y": each["reward"] if is_drawn(each["reward"]) else None,
                "colour": "bad" if each["error_class"] else "c0" if each["for_training"] else "c4",
                "share": 1 if each["here"] else 0.6,
                "here": each["here"],
                "text": f"{where}: {reward} ({visible(each['trace_id'][:8])})",
                "address": each["address"],
            }
        )
    name = f"rewards of {len(rows)} attempts by step"
    figures: dict[str, Any] = {"unit": "", "across": "step", "x": [], "steps": [], "series": [], "exit": None}
    return _box(figures | {"dots": sorted(dots, key=lambda dot: dot["x"])}, name, name, "attempts")


def _box(figures: Mapping[str, Any], name: str, sentence: str, look: str = "") -> Markup:
    box = Markup('<div class="chart {}" role="group" tabindex="0" aria-label="{}" data-chart="{}"><p>{}</p></div>')
    return box.format(look, name, json.dumps(figures, separators=(",", ":"), allow_nan=False), sentence)


def text_of(drawn: Chart, steps: Steps) -> str:
    """Return a sentence with the first and the last value of each series."""
    descriptions = []
    for one in drawn["series"]:
        of = one.get("steps", steps)
        known = [(value, of[place]["step"]) for place, value in enumerate(one["values"]) if value is not None]
        if known:
            (first, begin), (last, end) = known[0], known[-1]
            descriptions.append(f"{one['name']}: {first:.4g} at step {begin}, {last:.4g} at step {end}")
    return "; ".join(descriptions)


def _series(position: int, one: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return a series with its values at the places that are drawn; one with its own steps has places of its own."""
    own = thin([one["values"]]) if "steps" in one else places
    return {
        "name": visible(one["name"]),
        "kind": one.get("kind"),
        "colour": f"c{(one.get('colour') or f's{position % NUM_COLOURS}')[1:]}",
        **{name: [_json_number(one[name][place]) for place in own] for name in LISTS if one.get(name)},
        **(_along([one["steps"][place] for place in own]) if "steps" in one else {}),
    }


def _along(steps: Steps) -> dict[str, Any]:
    return {"x": [_x(each) for each in steps], "steps": [each["step"] for each in steps]}


def _x(step: Mapping[str, Any]) -> float:
    return float(f"{step.get('x', step['step']):.7g}")


def _addresses(steps: Steps) -> dict[str, Any]:
    """Return `to`, what stands before the number in the addresses of steps; `addresses` where they end otherwise."""
    addresses = [each.get("address") for each in steps]
    if not addresses or None in addresses:
        return {"to": None}
    begin = str(addresses[0]).removesuffix(str(steps[0]["step"]))
    plain = all(address == f"{begin}{each['step']}" for address, each in zip(addresses, steps, strict=True))
    return {"to": begin} if plain else {"addresses": addresses}


def _sum_counts(columns: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*columns, strict=True)]


def _scatter(drawn: Chart, steps: Steps) -> list[dict[str, Any]]:
    """Return a dot for each step, in five shades by age."""
    rows = zip(drawn["over"], drawn["series"][0]["values"], steps, strict=True)
    known = [(x, y, each) for x, y, each in rows if is_drawn(x) and is_drawn(y)]
    dots = [
        {
            **{"x": _json_number(x), "y": _json_number(y), "colour": "c0", "here": False},
            **{"share": (0.2, 0.35, 0.5, 0.7, 1)[5 * place // len(known)], "address": each.get("address")},
            "text": f"step {each['step']}: {number(x)} {drawn['across']}, reward {number(y)}",
        }
        for place, (x, y, each) in enumerate(known)
    ]
    return sorted(dots, key=lambda dot: dot["x"])


def _json_number(value: float | None) -> float | str | None:
    # Five digits are more than a tip shows, and keep a page of many charts small.
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.5g}")
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


SPARK_WIDTH, SPARK_HEIGHT, SPARK_MARGIN = 132.0, 28.0, 3.0
MAX_SPARK_POINTS = 50


def sparkline(values: Sequence[float | None], title: str) -> Markup:
    """Return a small line of values, with gaps where there are none and a dot at the last; nothing without values."""
    places = [place for place in thin([list(values)], MAX_SPARK_POINTS) if is_drawn(values[place])]
    if not places:
        return Markup("")
    known = [values[place] or 0.0 for place in places]
    x = Scale(0, max(1, len(values) - 1), SPARK_MARGIN, SPARK_WIDTH - SPARK_MARGIN)
    y = Scale(*around(known), SPARK_HEIGHT - SPARK_MARGIN, SPARK_MARGIN)
    points = [f"{short(x.at(place))} {short(y.at(value))}" for place, value in zip(places, known, strict=True)]
    gaps = [at == 0 or None in values[places[at - 1] : place] for at, place in enumerate(places)]
    path = "".join(f"{'M' if gap else 'L'}{point}" for gap, point in zip(gaps, points, strict=True))
    last = Markup('<path class="dot" d="M{}h0"/>').format(points[-1])
    svg = '<svg class="spark s0" viewBox="0 0 {} {}" role="img" aria-label="{}"><path class="line" d="{}"/>{}</svg>'
    return Markup(svg).format(short(SPARK_WIDTH), short(SPARK_HEIGHT), title, path, last)


MAX_CELLS = 200
"""Columns of a ledger from which on neighbours in a row that look alike are one cell."""


def cell_class(by: int) -> str:
    """Return the class of what a run computed, by its number in the ledger's runs: own work is the first."""
    return "s0" if by == 0 else f"s{1 + (by - 1) % (NUM_COLOURS - 1)}"


def ledger_cells(table: Mapping[str, Any], addresses: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the cells of a ledger: row, column, `span` in columns, class, title, address; see `flows.queries.ledger`.

    `addresses` are those of steps, by their numbers as texts.
    """
    columns, stages = table["columns"], table["stages"]
    for row, stage in enumerate(stages):
        looks = [_look(column, row, stages) for column in columns]
        keys = looks if len(looks) > MAX_CELLS else range(len(looks))
        for _, alike in groupby(enumerate(keys), itemgetter(1)):
            places = [place for place, _ in alike]
            first, last = columns[places[0]], columns[places[-1]]
            if look := looks[places[0]]:
                cell = first["cells"][row] if first["cells"] else None
                title = _cell_title(first["step"], last["step"], stage, cell, table["runs"])
                yield {
                    **{"row": row, "column": places[0], "span": len(places), "class": look, "title": title},
                    "address": addresses.get(str(first["step"])),
                }


def _look(column: Mapping[str, Any], row: int, stages: Sequence[str]) -> str:
    """Return the classes of a cell; an evaluation is of the policy before the step, and says nothing of its begin."""
    cells = column["cells"] or [None] * len(stages)
    if cell := cells[row]:
        return f"{cell_class(cell['by'])}{' shared' if cell['by'] else ''}{'' if cell['finished'] else ' unfinished'}"
    begun = any(cell for stage, cell in zip(stages, cells, strict=True) if stage != EVALUATION)
    # The last policy may have been evaluated: there is no such step.
    if stages[row] == EVALUATION or (column["cells"] and not begun):
        return ""
    return "missing" if begun else "planned"


def _cell_title(step: int, last: int, stage: str, cell: Mapping[str, Any] | None, runs: Sequence[str]) -> str:
    stage = stage.replace("_", " ")
    if cell is None:
        return ""
    by = runs[cell["by"]]
    if last != step:
        return f"steps {step} to {last}, {stage}: computed by {by}"
    rows = ", ".join(f"{count:,} {table}" for table, count in cell["rows"].items() if count) or "no rows"
    done = seconds(cell["seconds"]) if cell["finished"] else "in parts so far"
    return f"step {step}, {stage}: {rows}\n{done}, key {cell['key'][:8]}\ncomputed by {by}"


def segment(sample: Mapping[str, Any], longest: int, largest: float | None, rewards: Sequence[Any]) -> dict[str, Any]:
    """Return a sample of a packed row as it is drawn: `x` and `width` in per cent, class and title.

    `longest` are the tokens that fill the width, `largest` the size of the batch's largest advantage, `rewards` its
    lowest and highest reward: what the colours are measured by.
    """
    environment = "none" if sample["of_environment"] is None else sample["of_environment"] % NUM_COLOURS
    shades = f"adv-{diverging(sample['advantage'], largest)} rew-{sequential(sample['reward'], *rewards)}"
    numbers = [f"{name} {number(sample[name], 4)}" for name in ("advantage", "reward", "baseline")]
    where = f"{sample['environment']} / {sample['example_id']}" if sample["environment"] else "its trace is not there"
    lines = [sample["sample_id"], where, *numbers, f"{sample['num_tokens']} tokens, from {sample['start']} on"]
    return {
        **{"x": 100 * sample["start"] / longest, "width": 100 * sample["num_tokens"] / longest},
        "class": f"seg {shades} own-{sample['place'] % NUM_COLOURS} env-{environment}",
        "title": "\n".join(one_line(line, 120) for line in [*lines, sample["said"] or "nothing was said"]),
    }
