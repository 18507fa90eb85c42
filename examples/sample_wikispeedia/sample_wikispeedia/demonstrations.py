"""Noisy demonstrations for a supervised warm start: walks through the graph, most of them without an aim."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from chat_loop.demonstrating import command, read

from sample_wikispeedia.graph import Graph, Trip, graph, prompt, shortest, trips
from sample_wikispeedia.walk import BACK, CLICK, Walk
from sample_wikispeedia.words import SCHEMAS, words

Message = dict[str, Any]


def demonstrations(
    count: int,
    links: Graph,
    *,
    seed: int,
    right: float = 0.2,
    back: float = 0.1,
    max_moves: int = 4,
) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of messages, and of tools as JSON text.

    A share `right` goes a shortest way. The others follow the first link of each page, or go back with probability
    `back`, until they are there or have made `max_moves`. Raises ValueError where a share is not one.
    """
    if not (0 <= right <= 1 and 0 <= back <= 1):
        raise ValueError(f"right {right} and back {back}: shares from 0 to 1")
    # Which form a row takes must not follow from its trip, or the model could learn the rule.
    draw = random.Random(f"forms {seed}")
    every = list(trips(None, links, 1, 3, seed))
    for _ in range(count):
        trip = draw.choice(every)
        moves = shortest(links, trip) if draw.random() < right else aimless(links, trip, draw, back, max_moves)
        messages = [{"role": "user", "content": prompt(links, trip)}, *walked(links, trip, moves)]
        yield {"messages": messages, "tools": json.dumps(SCHEMAS)}


def aimless(links: Graph, trip: Trip, draw: random.Random, back: float, max_moves: int) -> list[str]:
    """Topics to click, the first of each page, or an empty one to go back, until the trip's target or `max_moves`."""
    path, moves = [trip.start], []
    while path[-1] != trip.target and len(moves) < max_moves:
        if len(path) > 1 and draw.random() < back:
            path.pop()
            moves.append("")
        else:
            path.append(links[path[-1]][0])
            moves.append(path[-1])
    return moves


def walked(links: Graph, trip: Trip, moves: Sequence[str]) -> list[Message]:
    """The calls of a walk, an empty move going back, with their results; a walk ends with its last call."""
    walk = Walk()
    walk.begin(trip.start)
    messages: list[Message] = []
    for number, topic in enumerate(moves):
        name, given = (CLICK, {"page": topic}) if topic else (BACK, {})
        call = {"id": f"call_{number}", "type": "function"} | {
            "function": {"name": name, "arguments": json.dumps(given)}
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = walk.click(links, topic) if topic else walk.back(links)
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
    return messages[:-1]


def main() -> None:
    """Run the command line."""
    parser = command(__doc__)
    parser.add_argument("--right", type=float, default=0.2, help="share that goes a shortest way")
    parser.add_argument("--back", type=float, default=0.1, help="how often another walk goes back")
    parser.add_argument("--max-moves", type=int, default=4, help="longest walk of the others")
    parser.add_argument("--num-topics", type=int, help="topics of the graph; all without it")
    files, choices = read(parser)
    links = graph(choices.pop("num_topics"))
    files.write(demonstrations(links=links, **choices), words(links))


if __name__ == "__main__":
    main()
