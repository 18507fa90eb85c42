"""Filters of groups: one lost member and the whole group goes; what is compared with what, against a loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.builders import failed, trace
from tests.fixtures.stages import credited_by, judged

ALONE = [{"type": "errored"}, {"type": "incomplete_group"}]
ZERO = [{"type": "errored"}, {"type": "zero_advantage"}]


def test_the_rest_of_a_group_that_lost_a_member_goes_too():
    rows = [trace("a"), trace("b", reward=0.0), failed("c"), trace("d", group_id="g1"), trace("e", group_id="g1")]
    verdicts = judged(rows, filters=ALONE)
    reasons = {name: verdict["reason"] for name, verdict in verdicts.items()}
    assert reasons == {"a": "incomplete_group", "b": "incomplete_group", "c": "errored", "d": None, "e": None}
    assert verdicts["a"]["evidence"]["incomplete_group"] == {"members": 2, "size": 3}


@pytest.mark.parametrize(
    ("other", "found_later", "reason"),
    [
        (trace("b", reward=None), {}, "incomplete_group"),
        (failed("b", reward=1.0), {}, "incomplete_group"),  # a reward does not make up for an error
        (trace("b", is_truncated=True), {"filters": [*ALONE, {"type": "truncated", "enforce": True}]}, None),
        (trace("b"), {"quarantined": {"b": "why"}}, None),  # it was scored, whatever was found since
        (trace("b", trainable=False, reward=None), {}, None),
    ],
    ids=["unscored", "errored", "truncated", "quarantined", "not trained"],
)
def test_a_group_has_lost_a_trained_member_without_a_reward(other, found_later, reason):
    assert judged([trace("a"), other], **({"filters": ALONE} | found_later))["a"]["reason"] == reason


def test_a_group_of_frozen_seats_alone_loses_nobody():
    rows = [trace("a"), trace("b", reward=0.0), trace("judge", group_id="g1", trainable=False, reward=None)]
    assert [verdict["detected"] for verdict in judged(rows, filters=ALONE).values()] == [[], [], []]


@given(st.lists(st.tuples(st.sampled_from("gh"), st.sampled_from(["fine", "failed", "unscored"])), max_size=8))
def test_a_group_is_kept_as_a_whole_or_not_at_all(made):
    kinds = {"fine": trace, "failed": failed, "unscored": lambda name, **others: trace(name, reward=None, **others)}
    rows = [kinds[kind](f"t{n}", group_id=group) for n, (group, kind) in enumerate(made)]
    verdicts = judged(rows, filters=ALONE)
    for group in "gh":
        outcomes = [kind for of, kind in made if of == group]
        kept = [verdicts[f"t{n}"]["keep"] for n, (of, _) in enumerate(made) if of == group]
        assert kept == [set(outcomes) == {"fine"}] * len(kept)


def left_out(traces, algorithms=None, **sections):
    """The traces that zero_advantage drops; `algorithms` are those of environments, by name."""
    if algorithms:
        sections["environments"] = credited_by(algorithms)
    verdicts = judged(traces, filters=ZERO, **sections)
    return {name for name, row in verdicts.items() if row["reason"] == "zero_advantage"}


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
    rae, grpo = {"type": "rae"}, {"type": "grpo"}
    assert left_out(rows, {"x": rae, "y": None}) == {"y1", "y2"}
    assert left_out(rows, {"x": grpo, "y": None}, algorithm=rae) == {"x1", "x2"}


EPISODES = [("one", 1.0), ("one", 1.0), ("two", 0.0), ("two", 0.5)]
"""Episode and reward of four seats: in their episode those of the first are alike, over the group all differ."""
IN_EPISODE = {"type": "hierarchical_grpo", "episode_agents": ["solver"]}


def solvers(name, **columns):
    return [
        trace(f"{name}{n}", agent="solver", episode_id=episode, reward=reward, **columns)
        for n, (episode, reward) in enumerate(EPISODES)
    ]


TRACES = st.lists(
    st.tuples(
        st.sampled_from("gh"), st.sampled_from("ab"), st.sampled_from(["one", "two"]), st.sampled_from([0.0, 1.0, None])
    ),
    max_size=10,
)


def test_an_environment_has_compared_agents_of_its_own():
    rows = [row for name in ("duel", "maze") for row in solvers(name, environment=name, group_id=name)]
    assert left_out(rows, {"duel": IN_EPISODE, "maze": IN_EPISODE | {"episode_agents": []}}) == {"duel0", "duel1"}


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
