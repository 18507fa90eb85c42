"""The topics and their links: plain functions that need nothing but the standard library.

A graph is a mapping from each topic to the topics that its page links to, in the order of the page.
"""

import json
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

Graph = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Trip:
    """From which topic to which, and the fewest clicks that it takes."""

    start: str
    target: str
    distance: int


@cache
def every_link() -> Graph:
    """The graph that the package ships with; every topic can be reached from every other."""
    return {
        topic: tuple(links)
        for topic, links in json.loads((files("sample_wikispeedia") / "links.json").read_text()).items()
    }


def graph(num_topics: int | None) -> Graph:
    """The shipped graph without some topics, so that `num_topics` stay; None keeps all.

    Topics with few links go first, ties are drawn. Every topic can still be reached from every other. Raises
    ValueError where so few cannot be had.
    """
    kept, draw = every_link(), random.Random("topics 0")
    wanted = len(kept) if num_topics is None else num_topics
    while len(kept) > wanted and (smaller := _without_one(kept, draw)):
        kept = smaller
    if len(kept) != wanted:
        raise ValueError(
            f"num_topics {wanted}: it can be {len(kept)} to {len(every_link())}; fewer would leave topics that cannot "
            "be reached"
        )
    return kept


def _without_one(links: Graph, draw: random.Random) -> Graph | None:
    """The graph without the least linked topic that all others can do without; None where there is none."""
    num_links = Counter(topic for name, linked in links.items() for topic in (*linked, *(name for _ in linked)))
    order = {topic: (num_links[topic], draw.random()) for topic in links}
    for topic in sorted(order, key=lambda name: order[name]):
        rest = {name: tuple(to for to in links[name] if to != topic) for name in links if name != topic}
        if rest and is_connected(rest):
            return rest
    return None


def is_connected(links: Graph) -> bool:
    """Whether every topic can be reached from every other: from the first one all, and from all the first one."""
    back: dict[str, list[str]] = {topic: [] for topic in links}
    for topic, linked in links.items():
        for other in linked:
            back[other].append(topic)
    first = next(iter(links))
    return len(distances(links, first)) == len(distances(back, first)) == len(links)


def distances(links: Mapping[str, Collection[str]], start: str) -> dict[str, int]:
    """The fewest clicks from `start` to every topic that can be reached: breadth first."""
    found = {start: 0}
    edge = [start]
    while edge:
        edge = [other for topic in edge for other in links[topic] if _noted(found, other, found[topic] + 1)]
    return found


def _noted(found: dict[str, int], topic: str, distance: int) -> bool:
    is_new = topic not in found
    found.setdefault(topic, distance)
    return is_new


def shortest(links: Graph, trip: Trip) -> list[str]:
    """The topics to click on a shortest way, the first of equal ones in the order of the pages."""
    path = [trip.start]
    while path[-1] != trip.target:
        left = {other: distances(links, other)[trip.target] for other in links[path[-1]]}
        path.append(min(left, key=lambda other: left[other]))
    return path[1:]


def trips(count: int | None, links: Graph, min_distance: int, max_distance: int, seed: int) -> Iterator[Trip]:
    """Yield `count` different trips of so many clicks in an order drawn by `seed`; None yields all that there are.

    Raises ValueError where there are fewer, or none.
    """
    every = [
        Trip(start, target, distance)
        for start in sorted(links)
        for target, distance in sorted(distances(links, start).items())
        if max(min_distance, 1) <= distance <= max_distance
    ]
    if not every or (count is not None and count > len(every)):
        raise ValueError(
            f"{'all' if count is None else count} trips of {min_distance} to {max_distance} clicks between "
            f"{len(links)} topics: there are {len(every)}; ask for fewer, or allow more clicks or topics"
        )
    random.Random(seed).shuffle(every)
    yield from every[:count]


def page(links: Graph, topic: str) -> str:
    """What a topic's page shows: its name and its links."""
    return f"{topic}: {' '.join(links[topic])}"


def prompt(links: Graph, trip: Trip) -> str:
    """The request to go somewhere, and the page where the walk starts."""
    return f"Go from {trip.start} to {trip.target}\n{page(links, trip.start)}"
