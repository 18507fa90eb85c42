"""Attempts at one example over a run: rewards by step, each a link to its trace."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flows.viewer.drawing.scales import Scale, around, label
from flows.viewer.drawing.svg import drawing, link, quoted, short, tag, text

WIDTH, HEIGHT = 320.0, 120.0
LEFT, RIGHT, TOP, BOTTOM = 34.0, 8.0, 8.0, 20.0
BESIDE = 8.0
"""Room between attempts of one step."""
MOST = 1000
"""Attempts that are drawn, the last ones."""


def attempts(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return attempts as points; those without a reward stand on a line of their own at the foot.

    `rows` have step, reward (None for none), error_class, for_training, here, trace_id and address.
    """
    rows = list(rows)[-MOST:]
    steps = [each["step"] for each in rows] or [0]
    x = Scale(min(steps) - 0.5, max(steps) + 0.5, LEFT, WIDTH - RIGHT)
    rewards = [each["reward"] for each in rows if each["reward"] is not None]
    y = Scale(*around(rewards), HEIGHT - BOTTOM - 8, TOP)
    lines = [tag("path", d=f"M{short(LEFT)} {short(y.at(each))}H{short(WIDTH - RIGHT)}") for each in y.ticks(3)]
    left = [text(LEFT - 5, y.at(each) + 3.5, label(each), text_anchor="end") for each in y.ticks(3)]
    whole = sorted({int(each) for each in x.ticks(6) if min(steps) <= each <= max(steps) and each == int(each)})
    below = [text(x.at(each), HEIGHT - 4, f"{each}", text_anchor="middle") for each in whole]
    apart = [*zip(rows, _apart(rows, x), strict=True)]
    points = [_point(each, at, y) for each, at in sorted(apart, key=lambda pair: bool(pair[0]["here"]))]
    told = f"rewards of {len(rows)} attempts by step"
    grid = tag("g", *lines, class_="grid"), tag("g", *left, *below, class_="ticks")
    return drawing(WIDTH, HEIGHT, (*grid, *points), class_="attempts", role="group", aria_label=told)


def _apart(rows: Sequence[Mapping[str, Any]], x: Scale) -> list[float]:
    """Return where attempts stand across: those of one step beside each other, within the room of a step."""
    counts = Counter(each["step"] for each in rows)
    room = 0.8 * (x.end - x.begin) / (x.high - x.low)
    seen: Counter[int] = Counter()
    found = []
    for each in rows:
        step, seen[each["step"]] = each["step"], seen[each["step"]] + 1
        gap = min(BESIDE, room / counts[step])
        found.append(x.at(step) + (seen[step] - (counts[step] + 1) / 2) * gap)
    return found


def _point(each: Mapping[str, Any], across: float, y: Scale) -> str:
    reward = each["reward"]
    known = reward is not None and math.isfinite(reward)
    kind = "failed" if each["error_class"] else "trained" if each["for_training"] else "scored"
    said = "no reward" if reward is None else f"reward {reward:.4g}"
    where = f"step {each['step']}" if each["for_training"] else f"evaluation of policy {each['step']}"
    dot = tag(
        "circle",
        tag("title", quoted(f"{where}: {said} ({each['trace_id'][:8]})")),
        cx=across,
        cy=y.at(reward) if known else HEIGHT - BOTTOM,
        r=5.0 if each["here"] else 3.0,
        class_=f"{kind}{' here' if each['here'] else ''}",
    )
    return link(each["address"], dot, aria_label=f"{where}, {said}", tabindex="-1")
