"""Zero advantage: what is compared with what, against a loop over traces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.filtering.stage import STAGE, filtering
from tests.fixtures.builders import exchange, table, trace, view

ZERO = [{"type": "errored"}, {"type": "zero_advantage"}]


def left_out(traces, **sections):
    messages = [row for one in traces for row in exchange(one["trace_id"])]
    tables = {"traces": table("traces", traces), "messages": table("messages", messages)}
    config = view(STAGE, **({"filtering": {"filters": ZERO}} | sections))
    rows = filtering(tables, config, quarantined={})["verdicts"].to_pylist()
    return {row["trace_id"] for row in rows if row["reason"] == "zero_advantage"}


def environments(**algorithms):
    return [{"name": name, "taskset": {"id": name}, "algorithm": each} for name, each in algorithms.items()]


@pytest.mark.parametrize(
    ("algorithm", "learns"),
    [
        ({"type": "grpo"}, False),
        ({"type": "rloo"}, False),
        ({"type": "rae"}, True),
        ({"type": "opsd"}, True),
        ({"type": "grpo", "length_penalty": {}}, True),
        ({"type": "grpo", "overlong": {"max_tokens": 8, "buffer_tokens": 4}}, True),
        ({"type": "custom", "function": "m:f", "from_groups": False}, True),
        ({"type": "custom", "function": "m:f"}, False),
    ],
    ids=str,
)
def test_who_learns_from_equal_rewards_keeps_them(algorithm, learns):
    assert left_out([trace("a"), trace("b")], algorithm=algorithm) == (set() if learns else {"a", "b"})


def test_each_environment_is_judged_by_its_own_algorithm():
    rows = [trace(name, group_id=name[0], environment=name[0]) for name in ("x1", "x2", "y1", "y2")]
    assert left_out(rows, environments=environments(x={"type": "rae"}, y=None)) == {"y1", "y2"}
    assert left_out(rows, environments=environments(x={"type": "grpo"}, y=None), algorithm={"type": "rae"}) == {
        "x1",
        "x2",
    }


def test_agents_of_a_group_are_not_compared_with_each_other():
    rows = [trace(f"{agent}{n}", agent=agent, reward=float(agent == "a")) for agent in "ab" for n in range(2)]
    assert left_out(rows) == {"a0", "a1", "b0", "b1"}
    assert left_out([*rows, trace("a2", agent="a", reward=0.5)]) == {"b0", "b1"}


def test_agents_that_are_compared_in_their_episode_only():
    algorithm = {"type": "hierarchical_grpo", "episode_agents": ["solver"]}
    rows = [
        trace("s1", agent="solver", episode_id="one", reward=1.0),
        trace("s2", agent="solver", episode_id="one", reward=1.0),
        trace("s3", agent="solver", episode_id="two", reward=0.0),
        trace("s4", agent="solver", episode_id="two", reward=0.5),
        trace("p1", agent="proposer", episode_id="one", reward=0.0),
        trace("p2", agent="proposer", episode_id="two", reward=1.0),
    ]
    assert left_out(rows, algorithm=algorithm) == {"s1", "s2"}
    assert left_out(rows) == set(), "over the group, all of them differ"


TRACES = st.lists(
    st.tuples(
        st.sampled_from("gh"), st.sampled_from("ab"), st.sampled_from(["one", "two"]), st.sampled_from([0.0, 1.0, None])
    ),
    max_size=10,
)


def test_an_environment_has_compared_agents_of_its_own():
    seats = [("one", 1.0), ("one", 1.0), ("two", 0.0), ("two", 0.5)]
    rows = [
        trace(f"{name}{n}", environment=name, group_id=name, agent="solver", episode_id=episode, reward=reward)
        for name in ("duel", "maze")
        for n, (episode, reward) in enumerate(seats)
    ]
    apart = {"type": "hierarchical_grpo", "episode_agents": ["solver"]}
    own = environments(duel=apart, maze={"type": "hierarchical_grpo", "episode_agents": []})
    assert left_out(rows, environments=own) == {"duel0", "duel1"}


@given(made=TRACES, in_episode=st.booleans())
def test_it_is_what_a_loop_over_traces_says(made, in_episode):
    rows = [
        trace(f"t{n}", group_id=group, agent=agent, episode_id=f"{group}{episode}", reward=reward)
        for n, (group, agent, episode, reward) in enumerate(made)
    ]
    algorithm = {"type": "hierarchical_grpo", "episode_agents": ["a"] if in_episode else []}

    def peers(row):
        episodic = in_episode and row["agent"] == "a"
        return [
            other["reward"]
            for other in rows
            if other["reward"] is not None
            and (other["group_id"], other["agent"]) == (row["group_id"], row["agent"])
            and (not episodic or other["episode_id"] == row["episode_id"])
        ]

    expected = {row["trace_id"] for row in rows if row["reward"] is not None and len(set(peers(row))) == 1}
    assert left_out(rows, algorithm=algorithm) == expected
