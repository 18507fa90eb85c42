"""Rollouts as SVG: attempts at an example, message graphs, the time of a rollout, the samples of a packed row."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flows.reporting.formats import number, one_line, seconds
from flows.reporting.svg import (
    NUM_COLOURS,
    Scale,
    around,
    diverging,
    label,
    link,
    quote,
    sequential,
    short,
    svg_document,
    tag,
    text,
)

ATTEMPTS_WIDTH, ATTEMPTS_HEIGHT = 320.0, 120.0
LEFT, RIGHT, TOP, BOTTOM = 34.0, 8.0, 8.0, 20.0
BESIDE = 8.0
"""Room between attempts of one step."""
MOST_ATTEMPTS = 1000
"""Attempts that are drawn, the last ones."""


def attempts(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return attempts as points; those without a reward stand on a line of their own at the foot.

    `rows` have step, reward (None for none), error_class, for_training, here, trace_id and address.
    """
    rows = list(rows)[-MOST_ATTEMPTS:]
    steps = [each["step"] for each in rows] or [0]
    x = Scale(min(steps) - 0.5, max(steps) + 0.5, LEFT, ATTEMPTS_WIDTH - RIGHT)
    rewards = [each["reward"] for each in rows if each["reward"] is not None]
    y = Scale(*around(rewards), ATTEMPTS_HEIGHT - BOTTOM - 8, TOP)
    right = short(ATTEMPTS_WIDTH - RIGHT)
    lines = [tag("path", d=f"M{short(LEFT)} {short(y.at(each))}H{right}") for each in y.ticks(3)]
    left = [text(LEFT - 5, y.at(each) + 3.5, label(each), text_anchor="end") for each in y.ticks(3)]
    whole = sorted({int(each) for each in x.ticks(6) if min(steps) <= each <= max(steps) and each == int(each)})
    below = [text(x.at(each), ATTEMPTS_HEIGHT - 4, f"{each}", text_anchor="middle") for each in whole]
    apart = [*zip(rows, _apart(rows, x), strict=True)]
    # The one that is looked at is drawn last, over the others.
    points = [_point(each, at, y) for each, at in sorted(apart, key=lambda pair: bool(pair[0]["here"]))]
    aria_label = f"rewards of {len(rows)} attempts by step"
    grid = tag("g", *lines, class_="grid"), tag("g", *left, *below, class_="ticks")
    return svg_document(
        ATTEMPTS_WIDTH, ATTEMPTS_HEIGHT, (*grid, *points), class_="attempts", role="group", aria_label=aria_label
    )


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
        tag("title", quote(f"{where}: {said} ({each['trace_id'][:8]})")),
        cx=across,
        cy=y.at(reward) if known else ATTEMPTS_HEIGHT - BOTTOM,
        r=5.0 if each["here"] else 3.0,
        class_=f"{kind}{' here' if each['here'] else ''}",
    )
    return link(each["address"], dot, aria_label=f"{where}, {said}", tabindex="-1")


ACROSS, DOWN, EDGE, LABEL = 15.0, 18.0, 12.0, 26.0
RADIUS = 4.2


def message_graph(paths: Sequence[Sequence[int]], roles: Mapping[str, str], addresses: Sequence[str]) -> Markup:
    """Return the ways from a root to each leaf: what they share is drawn once.

    `roles` are the classes of messages by number, `addresses` where each branch is read.
    """
    places: dict[int, tuple[float, float]] = {}
    edges, dots, names = [], [], []
    for branch, path in enumerate(paths):
        y = EDGE + branch * DOWN
        names.append(link(addresses[branch], text(0, y + 4, str(branch)), aria_label=f"branch {branch}"))
        for depth, message in enumerate(path):
            # It was drawn with a branch above: what branches share is there once.
            if message in places:
                continue
            places[message] = at = (LABEL + depth * ACROSS, y)
            if depth:
                edges.append(_edge(places[path[depth - 1]], at))
            dots.append(_dot(message, roles.get(str(message), ""), at))
    size = LABEL + max(len(path) for path in paths) * ACROSS, 2 * EDGE + (len(paths) - 1) * DOWN
    aria_label = f"{len(paths)} branches, {len(places)} messages"
    body = tag("g", *edges, class_="edges") + "".join(dots) + "".join(names)
    return Markup(
        tag("svg", body, width=size[0], height=size[1], class_="message-graph", aria_label=aria_label, role="group")
    )


def _edge(begin: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (a, b) = begin, end
    bend = f"C{short(x + 9)} {short(b)} {short(x)} {short(b)} {short(a)} {short(b)}"
    return tag("path", d=f"M{short(x)} {short(y)}{f'H{short(a)}' if y == b else bend}")


def _dot(message: int, role: str, at: tuple[float, float]) -> str:
    dot = tag("circle", tag("title", f"message {message}"), cx=at[0], cy=at[1], r=RADIUS, class_=role)
    return link(f"#m{message}", dot)


TIME_WIDTH, TIME_HEIGHT, TIME_GAP = 320.0, 16.0, 1.0
LEAST_SPAN = 1.5
"""Width of a span that took any time."""


def trace_time(spans: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a bar whose parts are as long as the spans took; nothing where none took any time."""
    whole = sum(each["seconds"] for each in spans)
    if not whole > 0:
        return Markup("")
    parts, at = [], 0.0
    for each in spans:
        width = max(LEAST_SPAN, TIME_WIDTH * each["seconds"] / whole) if each["seconds"] > 0 else 0.0
        parts.append(_span(each["name"], each["seconds"], at, width))
        inside = each["inside"]
        if inside and each["seconds"] > 0:
            # The model's time is measured apart from the span, and may come out a little longer.
            share = min(inside["seconds"] / each["seconds"], 1.0)
            parts.append(_span(inside["name"], inside["seconds"], at, width * share))
        at += width
    aria_label = ", ".join(f"{each['name']} {seconds(each['seconds'])}" for each in spans)
    return svg_document(max(at, TIME_WIDTH), TIME_HEIGHT, parts, class_="trace-time", role="img", aria_label=aria_label)


def _span(name: str, length: float, at: float, width: float) -> str:
    if not width:
        return ""
    title = tag("title", f"{name}: {seconds(length)}")
    return tag("rect", title, x=at, y=0.0, width=max(width - TIME_GAP, 0.5), height=TIME_HEIGHT, class_=name)


ROW_HEIGHT = 18


def packed_row(row: Mapping[str, Any], capacity: int | None, largest: float | None, rewards: tuple[Any, Any]) -> Markup:
    """Return a row as SVG as wide as its place; every segment leads to its trace.

    `capacity` are the tokens that fill the width (None: the row's own), `largest` the size of the batch's largest
    advantage, `rewards` its lowest and highest reward: what the colours are measured by.
    """
    # Without a capacity the row is as wide as its samples.
    longest = max([capacity or 1, *(each["start"] + each["num_tokens"] for each in row["samples"])])
    drawn = Markup("").join(_segment(each, longest, largest, rewards) for each in row["samples"])
    room = "" if capacity is None else f" of {capacity}"
    label = f"row {row['row']}: {row['num_samples']} samples, {row['num_tokens']}{room} tokens"
    return Markup(
        '<svg class="packed-row" width="100%" height="{}" role="img" aria-label="{}">'
        '<rect class="room" width="100%" height="{}"/>{}</svg>'
    ).format(ROW_HEIGHT, label, ROW_HEIGHT, drawn)


def _segment(sample: Mapping[str, Any], longest: int, largest: float | None, rewards: tuple[Any, Any]) -> Markup:
    start, width = (100 * sample[name] / longest for name in ("start", "num_tokens"))
    environment = "none" if sample["of_environment"] is None else sample["of_environment"] % NUM_COLOURS
    shades = f"adv-{diverging(sample['advantage'], largest)} rew-{sequential(sample['reward'], *rewards)}"
    classes = f"seg {shades} own-{sample['place'] % NUM_COLOURS} env-{environment}"
    inner = Markup('<rect class="{}" x="{:.4f}%" width="{:.4f}%" height="{}"><title>{}</title></rect>').format(
        classes, start, width, ROW_HEIGHT, _sample_title(sample)
    )
    if not sample["address"]:
        return inner
    return Markup('<a href="{}" aria-label="{}" tabindex="-1">{}</a>').format(
        sample["address"], f"trace {sample['trace_id'][:8]}", inner
    )


def _sample_title(sample: Mapping[str, Any]) -> str:
    """Return the lines that are shown of a sample when it is pointed at."""
    numbers = [f"{name} {number(sample[name], 4)}" for name in ("advantage", "reward", "baseline")]
    where = f"{sample['environment']} / {sample['example_id']}" if sample["environment"] else "its trace is not there"
    lines = [sample["sample_id"], where, *numbers, f"{sample['num_tokens']} tokens, from {sample['start']} on"]
    return "\n".join(one_line(line, 120) for line in [*lines, sample["said"] or "nothing was said"])
