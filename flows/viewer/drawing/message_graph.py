"""A message graph as a picture: branches under each other, messages from left to right, forks where branches part."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flows.viewer.drawing.svg import link, short, tag, text

ACROSS, DOWN, EDGE, LABEL = 15.0, 18.0, 12.0, 26.0
MOST_BRANCHES, MOST_ACROSS = 40, 90
"""Larger graphs are not drawn: the branches can be read one by one."""
R = 4.2


def drawable(paths: Sequence[Sequence[int]]) -> bool:
    """Say whether a graph has forks, and is small enough to be seen as a whole."""
    return 1 < len(paths) <= MOST_BRANCHES and max(len(path) for path in paths) <= MOST_ACROSS


def message_graph(paths: Sequence[Sequence[int]], roles: Mapping[str, str], addresses: Sequence[str]) -> Markup:
    """Return the ways from a root to each leaf: what they share is drawn once; nothing where it is not `drawable`.

    `roles` are the classes of messages by number, `addresses` where each branch is read.
    """
    if not drawable(paths):
        return Markup("")
    places: dict[int, tuple[float, float]] = {}
    edges, dots, names = [], [], []
    for branch, path in enumerate(paths):
        y = EDGE + branch * DOWN
        names.append(link(addresses[branch], text(0, y + 4, str(branch)), aria_label=f"branch {branch}"))
        for depth, message in enumerate(path):
            if message in places:
                continue
            places[message] = at = (LABEL + depth * ACROSS, y)
            if depth:
                edges.append(_edge(places[path[depth - 1]], at))
            dots.append(_dot(message, roles.get(str(message), ""), at))
    size = LABEL + max(len(path) for path in paths) * ACROSS, 2 * EDGE + (len(paths) - 1) * DOWN
    told = f"{len(paths)} branches, {len(places)} messages"
    body = tag("g", *edges, class_="edges") + "".join(dots) + "".join(names)
    return Markup(
        tag("svg", body, width=size[0], height=size[1], class_="message-graph", aria_label=told, role="group")
    )


def _edge(begin: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (a, b) = begin, end
    if y == b:
        return tag("path", d=f"M{short(x)} {short(y)}H{short(a)}")
    return tag(
        "path", d=f"M{short(x)} {short(y)}C{short(x + 9)} {short(b)} {short(x)} {short(b)} {short(a)} {short(b)}"
    )


def _dot(message: int, role: str, at: tuple[float, float]) -> str:
    return link(f"#m{message}", tag("circle", tag("title", f"message {message}"), cx=at[0], cy=at[1], r=R, class_=role))


def classes(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the class of each message by its number: that of its role, if it is one of the known ones."""
    known = ("system", "user", "assistant", "tool")
    return {str(row["message"]): f"by-{row['role'] if row['role'] in known else 'other'}" for row in rows}
