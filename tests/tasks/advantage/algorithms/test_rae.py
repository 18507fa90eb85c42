"""RAE: golden values by hand, one trace at a time as the paper has it, and state that goes from step to step."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import ESTIMATOR_STATES
from tasks.advantage.algorithms.credit import AdvantageBreach
from tasks.advantage.stage import STAGE
from tests.fixtures.builders import environments, exactly, failed, table, trace, view
from tests.fixtures.stages import advantage, advantages, tables_of

DYADIC = st.integers(-8, 8).map(lambda eighths: eighths / 8)
SEATS = st.tuples(st.sampled_from(["x", "y"]), st.sampled_from(["e0", "e1"]), st.sampled_from(["first", "second"]))
OTHER = trace("other", agent="second", example_id="elsewhere", reward=None)
"""Without a reward, it changes nothing; it makes an environment one of two agents."""


def step(traces, states=None, number=0, **section):
    """Return the credits and the states after these traces, every one without an error kept."""
    tables = tables_of(traces) | ({} if states is None else {"estimator_states": table("estimator_states", states)})
    sections = environments(x={}, y={})
    config = view(STAGE, algorithm={"type": "rae"} | section, environments=sections)
    made = advantage(tables, config, step=number)
    check_rows(made["estimator_states"], ESTIMATOR_STATES, RowPlace("estimator_states"))
    return made["samples"].to_pylist(), made["estimator_states"].to_pylist()


def seat(*rewards):
    return [trace(f"first-{i}", agent="first", reward=reward) for i, reward in enumerate(rewards)]


def seated(*rewards, states=None, number=0, **section):
    """Return the credits and the states after traces of one seat with these rewards, beside the other agent's."""
    rows, after = step([*seat(*rewards), OTHER], states, number, **section)
    assert rows[-1]["advantage"] is rows[-1]["baseline"] is None
    return rows[:-1], after


def state(value, count=1, agent="first", example_id="e0", environment="reverse"):
    row = {"environment": environment, "example_id": example_id, "agent": agent}
    return row | {"values": [value], "num_traces": count}


def test_a_cold_start_by_hand():
    rows, states = seated(1.0, 1.0)
    assert advantages(rows) == pytest.approx([0.9, 0.81])
    assert [row["baseline"] for row in rows] == pytest.approx([0.1, 0.19])
    assert rows[0]["rl_weights"] == [0, 0, 0, 1, 1] and rows[0]["advantages"] == pytest.approx([0, 0, 0, 0.9, 0.9])
    assert states == [state(pytest.approx(0.19), 2)]


def test_traces_of_one_seat_compound_and_are_not_averaged():
    rows, states = seated(1.0, 0.0, decay=0.5)
    assert advantages(rows) == [0.5, -0.25] and states == [state(0.25, 2)]


def test_a_reward_of_zero_goes_on_from_the_state():
    (row,), states = seated(0.0, states=[state(0.7, 3)], number=4, decay=0.5)
    assert (row["advantage"], row["baseline"]) == (pytest.approx(-0.35), pytest.approx(0.35))
    assert states == [state(pytest.approx(0.35), 4)]


def test_no_reward_is_no_advantage_no_weight_and_no_change():
    rows, states = seated(1.0, None, 1.0, decay=0.5)
    assert advantages(rows) == [0.5, None, 0.25]
    assert rows[1]["baseline"] is None and not any(rows[1]["rl_weights"]) and rows[1]["reward"] is None
    assert states == [state(0.75, 2)]


def test_an_errored_trace_changes_nothing():
    rows, states = step([*seat(1.0), failed("bad", agent="first", reward=5.0), OTHER], decay=0.5)
    assert advantages(rows) == [0.5, None] and states == [state(0.5)]


def test_seats_examples_and_environments_have_baselines_of_their_own():
    names = ("environment", "example_id", "agent")
    keys = [dict(zip(names, key, strict=True)) for key in product(("x", "y"), ("e0", "e1"), ("first", "second"))]
    traces = [trace(f"t{i}", group_id=f"g{i}", reward=float(i), **key) for i, key in enumerate(keys)]
    rows, states = step(traces, decay=0.5)
    assert advantages(rows) == [i / 2 for i in range(8)]
    assert states == [key | {"values": [i / 2], "num_traces": 1} for i, key in enumerate(keys)]


def test_a_baseline_for_each_agent_goes_on_over_examples():
    """Where every example is new, a baseline by example is 0 before its only reward, and this one is not."""
    new = [trace(f"n{i}", agent="first", example_id=f"new{i}", reward=1.0) for i in range(3)]
    rows, states = step([*new, OTHER], key="agent", decay=0.5, order="pre")
    assert advantages(rows) == [1.0, 0.5, 0.25, None]
    assert states == [state(0.875, 3, example_id="")]
    rows, states = step([*new, OTHER], states, number=1, key="agent", decay=0.5, order="pre")
    assert advantages(rows) == [0.125, 0.0625, 0.03125, None] and states == [state(0.984375, 6, example_id="")]
    rows, _ = step([*new, OTHER], decay=0.5, order="pre")
    assert advantages(rows) == [1.0, 1.0, 1.0, None]


@pytest.mark.parametrize(("key", "other", "example"), [("agent", "example", "e0"), ("example", "agent", "")])
def test_states_that_were_kept_by_the_other_key_are_no_cold_start(key, other, example):
    said = (
        "table estimator_states: the baseline of agent 'first' of environment 'reverse' was kept by key "
        f"{other!r}, and algorithm.key is {key!r}. Nothing was credited; all that was sampled is safe. Begin at step 0 "
        "(replay: without --steps), or go on with the key that it was kept by."
    )
    with pytest.raises(AdvantageBreach, match=exactly(said)):
        seated(1.0, states=[state(0.5, example_id=example)], number=1, key=key)


def test_the_key_is_in_the_keys_of_work_where_it_is_not_the_first_one():
    keys = ({}, {"key": "example"}, {"key": "agent"})
    plain, named, other = (view(STAGE, algorithm={"type": "rae"} | key).content() for key in keys)
    assert plain == named != other


@pytest.mark.parametrize("known", [None, [state(0.5)]])
def test_nothing_kept_leaves_the_state(known):
    rows, states = step([failed("bad", agent="first", num_turns=0)], known, number=1 if known else 0)
    assert rows == [] and states == (known or [])


def test_no_states_at_all_after_the_first_step_are_a_cold_start():
    assert advantages(seated(1.0, states=[], number=4)[0]) == pytest.approx([0.9])


@st.composite
def played(draw):
    """Draw traces of several seats in any order, some without a reward, and states of some of the seats."""
    traces = []
    for number in range(draw(st.integers(0, 12))):
        environment, example, agent = draw(SEATS)
        columns = {"environment": environment, "example_id": example, "agent": agent}
        traces.append(trace(f"t{number}", group_id=f"g{number}", reward=draw(DYADIC | st.none()), **columns))
    known = draw(st.dictionaries(SEATS, st.tuples(DYADIC, st.integers(1, 5))))
    states = [state(v, n, agent, example, environment) for (environment, example, agent), (v, n) in known.items()]
    return traces, states


def slowly(traces, states, decay, order, by_example):
    """Algorithm 1, one trace at a time: advantages, and baselines by seat.

    By agent and `pre` it is what prime-rl has in `RAEAlgorithm.score_group`, src/prime_rl/orchestrator/algo/rae.py."""
    baselines = {(row["environment"], row["example_id"], row["agent"]): row["values"][0] for row in states}
    found = []
    for one in traces:
        key, reward = (one["environment"], one["example_id"] if by_example else "", one["agent"]), one["reward"]
        if reward is None:
            found.append(None)
            continue
        old = baselines.get(key, 0.0)
        baselines[key] = decay * old + (1 - decay) * reward
        found.append(reward - (baselines[key] if order == "post" else old))
    return found, baselines


@settings(max_examples=20)
@given(played(), st.sampled_from([0.0, 0.25, 0.9]), st.sampled_from(["post", "pre"]), st.booleans())
def test_any_traces_are_credited_as_one_at_a_time_says(drawn, decay, order, by_example):
    traces, states = drawn
    if not by_example:
        seats = {(row["environment"], row["agent"]): row | {"example_id": ""} for row in states}
        states = list(seats.values())
    key = "example" if by_example else "agent"
    rows, after = step(traces, states, number=1, decay=decay, order=order, key=key)
    expected, baselines = slowly(traces, states, decay, order, by_example)
    assert advantages(rows) == pytest.approx(expected)
    assert {(r["environment"], r["example_id"], r["agent"]): r["values"][0] for r in after} == pytest.approx(baselines)
    rewarded = sum(one["reward"] is not None for one in traces)
    assert sum(row["num_traces"] for row in after) == rewarded + sum(row["num_traces"] for row in states)
    for row in rows:
        assert row["rl_weights"] == [0, 0, 0, *([0, 0] if row["advantage"] is None else [1, 1])]
        assert not any(row["ce_weights"]) and not any(row["ref_kl_weights"])


@settings(max_examples=15)
@given(st.lists(DYADIC, min_size=1, max_size=4), DYADIC, st.sampled_from([0.25, 0.5, 0.75]))
def test_post_is_pre_times_the_decay_exactly(rewards, before, decay):
    post, pre = (
        seated(*rewards, states=[state(before)], number=1, decay=decay, order=order) for order in ("post", "pre")
    )
    # Eighths times powers of a quarter are exact in binary, so that nothing is rounded.
    assert advantages(post[0]) == [decay * value for value in advantages(pre[0])]
    assert post[1] == pre[1]
