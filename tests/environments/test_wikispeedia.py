"""Walks through the graph: its shape, distances against a slow reference, the rules of moving, and two at once."""

from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_wikispeedia.graph import (
    Trip,
    distances,
    every_link,
    graph,
    page,
    shortest,
    trips,
)
from sample_wikispeedia.walk import BACK, CLICK, Walk, efficiency
from sample_wikispeedia.words import SCHEMAS

from tests.environments.scripted import calling, played

pytestmark = pytest.mark.engine

# From A straight to B and C; from there on round to A.
LINKS = {"A": ("B", "C"), "B": ("C",), "C": ("D",), "D": ("A",)}
SIZES = st.integers(8, 46)  # with fewer some seeds find no graph that holds together, which is an error of its own


def all_distances(links):
    """The fewest clicks between all pairs, by Floyd and Warshall."""
    found = {pair: inf for pair in product(links, links)}
    found |= {(topic, other): 1.0 for topic, linked in links.items() for other in linked}
    found |= {(topic, topic): 0.0 for topic in links}
    for middle, start, target in product(links, links, links):
        found[start, target] = min(found[start, target], found[start, middle] + found[middle, target])
    return found


@given(SIZES)
def test_a_part_of_the_graph_is_connected_and_has_no_links_of_its_own(num_topics):
    links = graph(num_topics)
    assert len(links) == num_topics and links == graph(num_topics)
    assert all(set(linked) == set(every_link()[topic]) & set(links) for topic, linked in links.items())
    assert all(len(distances(links, topic)) == num_topics for topic in links)


def test_distances_are_those_of_a_slow_reference():
    links = graph(20)
    slow = all_distances(links)
    assert {(a, b): d for a in links for b, d in distances(links, a).items()} == slow
    found = list(trips(None, links, 2, 3, seed=0))
    assert {(trip.start, trip.target): trip.distance for trip in found} == {
        pair: distance for pair, distance in slow.items() if 2 <= distance <= 3
    }
    for trip in found:
        way = shortest(links, trip)
        assert len(way) == trip.distance and way[-1] == trip.target
        assert all(step in links[before] for before, step in zip([trip.start, *way], way, strict=False))


def test_a_walk_by_hand():
    walk = Walk()
    walk.begin("A")
    assert walk.back(LINKS) == "nothing to go back to; A: B C"
    assert walk.click(LINKS, "D") == "no link 'D'; A: B C"
    assert walk.trail == ["A"], "what is refused is no move"
    assert walk.click(LINKS, "B") == "B: C" == page(LINKS, "B")
    assert walk.back(LINKS) == "A: B C"
    assert walk.click(LINKS, "C") == "C: D" and walk.click(LINKS, "D") == "D: A"
    assert walk.path == ["A", "C", "D"] and walk.trail == ["A", "B", "A", "C", "D"]
    # Two clicks would have done, and four moves were made.
    assert efficiency(walk.trail, "D", 2) == 0.5
    assert efficiency(walk.trail, "A", 2) == 0.0 == efficiency([], "A", 2)
    assert efficiency(["A", "C", "D"], "D", 2) == 1.0


@pytest.mark.nightly
def test_walks_that_share_a_server_stay_apart():
    links = graph(12)

    def reply(body):
        assert body["tools"] == SCHEMAS, "the server offers what demonstrations show"
        request, first = body["messages"][0]["content"].splitlines()
        start, target = request.removeprefix("Go from ").split(" to ")
        told = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        here = (told[-1] if told else first).split(": ")[-2].split("; ")[-1]
        assert told or here == start
        if not told:  # one step to the side and back, so that every walk leaves its start for longer than a call
            return calling(CLICK, page=links[start][-1])
        if len(told) == 1 and links[start][-1] != target:
            return calling(BACK)
        return calling(CLICK, page=shortest(links, Trip(here, target, 0))[0])

    settings = {"id": "sample_wikispeedia", "num_topics": 12, "min_distance": 2, "max_distance": 3, "num_examples": 12}
    episodes, _ = played(settings, ["agent"], reply, together=True)
    for (trace,) in (episode.traces for episode in episodes):
        task = trace.task.data
        way = shortest(links, Trip(task.start, task.target, task.distance))
        assert not trace.errors and trace.stop_condition == "arrived" and not trace.is_truncated
        assert trace.info["trail"] == [task.start, links[task.start][-1], task.start, *way]
        assert trace.rewards["success"].score == 1.0
        assert trace.rewards["efficiency"].score == pytest.approx(task.distance / (task.distance + 2))
        assert trace.reward == pytest.approx(0.5 + 0.5 * task.distance / (task.distance + 2))
        assert trace.metrics["num_moves"] == task.distance + 2 == trace.num_turns
    assert len(episodes) == 12 == len({trace.task.key for (trace,) in (each.traces for each in episodes)})


def test_walks_that_do_not_arrive_earn_nothing():
    replies = iter([calling(CLICK, page="Nowhere"), calling(BACK), "I give up"])
    settings = {"id": "sample_wikispeedia", "num_topics": 12, "min_distance": 2, "num_examples": 1}
    ((episode,), bodies) = played(settings, ["agent"], lambda body: next(replies))
    (trace,) = episode.traces
    told = [message["content"] for message in bodies[-1]["messages"] if message["role"] == "tool"]
    start = page(graph(12), trace.task.data.start)
    assert told == [f"no link 'Nowhere'; {start}", f"nothing to go back to; {start}"]
    assert trace.reward == 0.0 and trace.metrics["num_moves"] == 0.0 and trace.info["trail"] == [trace.task.data.start]
