"""The ledger of a run as a picture: steps across, stages down, each cell coloured by the run that computed it."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flows.viewer.drawing.scales import label
from flows.viewer.drawing.svg import NUM_COLOURS, drawing, link, tag, text, title
from flows.viewer.words import seconds
from flows.views.curve import ticks

LEFT, TOP, BOTTOM, ROW = 142.0, 4.0, 20.0, 18.0
NARROW, WIDE, WIDTH = 4.0, 26.0, 1110.0
"""Least and most of a column, and what all of them take where there are few enough."""
MOST_USERS = 6
EVALUATION = "evaluation"
"""Of the policy that a step begins with; not every step has one."""


def ledger(told: Mapping[str, Any], addresses: Mapping[str, str]) -> Markup:
    """Return the grid that `data.shared.ledger` gives; each column is a link to its step."""
    columns, stages = told["columns"], told["stages"]
    width = max(NARROW, min(WIDE, WIDTH / max(1, len(columns))))
    height = TOP + ROW * len(stages)
    names = [
        text(LEFT - 10, TOP + ROW * row + ROW / 2 + 3.5, stage.replace("_", " "), text_anchor="end", class_="name")
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
    body = [*names, *cells, tag("g", *_numbers(columns, width, height), class_="ticks")]
    total = LEFT + width * len(columns) + 6
    return drawing(
        total,
        height + BOTTOM,
        body,
        class_="ledger",
        role="group",
        aria_label="Slices by step and stage",
        width=total,
        height=height + BOTTOM,
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
    place = {"x": at, "width": width - min(1.5, 0.2 * width), "height": ROW - 2, "rx": "2"}
    found = []
    for row, (stage, cell) in enumerate(zip(stages, cells, strict=True)):
        if cell is None:
            if stage != EVALUATION and not after:
                look = "cell missing" if begun else "cell planned"
                found.append(tag("rect", **place, y=TOP + ROW * row, class_=look))
            continue
        look = (
            f"cell {cell_class(cell['by'])}{' shared' if cell['by'] else ''}{'' if cell['finished'] else ' unfinished'}"
        )
        told = title(_told(column["step"], stage, cell, runs))
        found.append(tag("rect", told, **place, y=TOP + ROW * row, class_=look))
    return found


def _told(step: int, stage: str, cell: Mapping[str, Any], runs: Sequence[str]) -> str:
    rows = ", ".join(f"{count:,} {table}" for table, count in cell["rows"].items() if count) or "no rows"
    by = runs[cell["by"]]
    done = seconds(cell["seconds"]) if cell["finished"] else "in parts so far"
    others = [name for name in cell["used_by"] if name != by]
    more = f" and {len(others) - MOST_USERS} more" if len(others) > MOST_USERS else ""
    users = f"\nused by {', '.join(others[:MOST_USERS])}{more}" if others else ""
    return f"step {step}, {stage.replace('_', ' ')}: {rows}\n{done}, key {cell['key'][:8]}\ncomputed by {by}{users}"


def _numbers(columns: Sequence[Mapping[str, Any]], width: float, height: float) -> list[str]:
    if not columns:
        return []
    first, last = columns[0]["step"], columns[-1]["step"]
    wanted = {each for each in ticks(first, last, 12) if each == int(each)}
    return [
        text(LEFT + width * (place + 0.5), height + 14, label(column["step"]), text_anchor="middle")
        for place, column in enumerate(columns)
        if column["step"] in wanted
    ]
