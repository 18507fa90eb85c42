"""Environments: each is credited as if it were alone, and refused where its algorithm cannot credit its agents."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.advantage.algorithms.credit import AdvantageBreach
from tasks.advantage.stage import STAGE
from tests.fixtures.builders import failed, message, table, trace, verdict, view
from tests.fixtures.stages import advantage, credited, credited_by, group, tables_of

TWO = [trace("a", agent="first"), trace("b", agent="second", reward=0.0)]
CUSTOM = {"type": "custom", "function": "nowhere:credit"}


@pytest.mark.parametrize("section", [{"type": "grpo"}, {"type": "rloo"}, {"type": "echo"}, CUSTOM], ids=str)
@pytest.mark.parametrize("step", [0, 3])
def test_several_agents_are_refused_by_what_keeps_none_apart(section, step):
    with pytest.raises(AdvantageBreach, match=r"environment 'reverse' holds trainable agents 'first' and 'second'"):
        credited(TWO, step=step, **section)


def test_a_seat_whose_traces_are_all_filtered_still_counts():
    verdicts = [verdict("a"), verdict("b", reason="truncated")]
    with pytest.raises(AdvantageBreach, match="'first' and 'second'"):
        credited(TWO, verdicts=verdicts, type="grpo")


def test_a_frozen_seat_and_a_rollout_that_failed_before_it_began_do_not_count():
    frozen = trace("b", agent="second", trainable=False)
    lost = failed("c", agent="agent", num_turns=0)
    verdicts = [verdict("a"), verdict("b", reason="untrainable"), verdict("c", reason="errored")]
    rows = credited([TWO[0], frozen, lost], verdicts=verdicts, step=0, type="grpo")
    assert [row["trace_id"] for row in rows] == ["a"]


def test_another_seat_in_another_group_is_compared_with_nobody():
    rows = credited([*group(1.0, 0.0, agent="first"), *group(1.0, 0.0, group_id="g1", agent="second")], type="grpo")
    assert [row["advantage"] for row in rows] == [0.5, -0.5, 0.5, -0.5]


@pytest.mark.parametrize("kind", ["rae", "hierarchical_grpo"])
def test_how_many_seats_there_are_is_not_judged_by_who_happened_to_play(kind):
    assert len(credited(group(1.0, 0.0, agent="solver"), type=kind, step=0)) == 2


ALGORITHMS = [
    {"type": "grpo"},
    {"type": "rloo"},
    {"type": "supervised"},
    {"type": "echo", "tool": {"alpha": 0.5}},
    {"type": "rae", "decay": 0.5},
]
NAMES = ("x", "y", "z")


def run(traces, own, states=None, messages=None, step=1):
    """Return credits by sample and the states, with an algorithm for each environment."""
    tables = tables_of(traces, answered(traces) if messages is None else messages)
    if states is not None:
        tables["estimator_states"] = table("estimator_states", states)
    made = advantage(tables, view(STAGE, environments=credited_by(own)), step=step)
    rows = made["estimator_states"].to_pylist() if "estimator_states" in made else []
    return {row["sample_id"]: row for row in made["samples"].to_pylist()}, rows


def answered(traces):
    """For each trace a question, an answer, what a tool says to it, and another answer."""
    columns = [
        {},
        {"parent": 0, "tokens": [4, 5], "sampled": True},
        {"parent": 1, "tokens": [6, 7], "role": "tool", "is_content": [False, True]},
        {"parent": 2, "tokens": [8], "sampled": True},
    ]
    return [message(one["trace_id"], number, **each) for one in traces for number, each in enumerate(columns)]


def known(environment, count=1):
    """States of an environment's only agent in as many examples."""
    row = {"environment": environment, "agent": "agent", "values": [0.25], "num_traces": 2}
    return [row | {"example_id": f"e{number}"} for number in range(count)]


@st.composite
def several(draw):
    """Draw traces of several environments in any order, with their messages in any order, and who credits each."""
    own = {name: draw(st.sampled_from(ALGORITHMS)) for name in NAMES}
    traces = [
        trace(
            f"{name}{number}", group_id=f"{name}-g{number % 2}", environment=name, reward=draw(st.integers(-4, 4)) / 4
        )
        for name in NAMES
        for number in range(draw(st.integers(0, 4)))
    ]
    return own, draw(st.permutations(traces)), draw(st.permutations(answered(traces)))


@settings(max_examples=12)
@given(several())
def test_each_environment_is_credited_as_if_it_were_alone(drawn):
    own, traces, messages = drawn
    known_states = [state for name in NAMES if own[name]["type"] == "rae" for state in known(name)]
    rows, states = run(traces, own, known_states, messages)
    apart, apart_states = {}, []
    for name in NAMES:
        mine = [one for one in traces if one["environment"] == name]
        ids = {one["trace_id"] for one in mine}
        parts = [row for row in messages if row["trace_id"] in ids]
        of_name = [state for state in known_states if state["environment"] == name]
        found, after = run(mine, {name: own[name]}, of_name, parts)
        apart |= found
        apart_states += after
    assert rows == apart
    assert sorted(states, key=str) == sorted(apart_states, key=str)


@pytest.mark.parametrize(("environment", "kept"), [("z", True), ("x", False)], ids=["not drawn", "without state"])
def test_state_stays_where_an_environment_was_not_drawn_and_its_algorithm_has_any(environment, kept):
    algorithms = {"x": {"type": "grpo"}, "z": {"type": "rae"}}
    _, states = run(group(1.0, 0.0, environment="x"), algorithms, known(environment), step=3)
    assert states == (known(environment) if kept else [])
