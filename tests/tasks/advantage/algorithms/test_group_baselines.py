"""What compares groups, by hand: each algorithm's figures, who is in a baseline, and which tokens get weight."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.builders import exchange, message, trace
from tests.fixtures.stages import advantages, credited, group

SINGLE = ("grpo", "dr_grpo", "rloo", "max_rl", "reinforce_pp")


def baselines(rows):
    return [row["baseline"] for row in rows]


def test_dr_grpo_is_grpo_without_the_deviation():
    rows = credited(group(3.0, 0.0, 0.0), type="dr_grpo", length_normaliser=7)
    assert advantages(rows) == [2, -1, -1] and baselines(rows) == [1, 1, 1]
    assert rows[0]["rl_weights"] == [0, 0, 0, 1, 1]  # the constant length is packing's


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((1.0, 1.0, 0.0, 0.0), [1, 1, -1, -1]),
        ((1.0, 0.0, 0.0, 0.0), [3, -1, -1, -1]),
        ((1.0, 1.0), [0, 0]),
        ((0.5, 0.0, 0.25, 0.25), [1, -1, 0, 0]),
        ((3.0, -1.0), [2, -2]),
        ((-1.0, 1.0), [0, 0]),  # exactly zero where the mean is not above it
        ((0.0, -1.0, -2.0), [0, 0, 0]),
    ],
)
def test_max_rl_by_hand(rewards, expected):
    rows = credited(group(*rewards), type="max_rl")
    assert advantages(rows) == expected and set(baselines(rows)) == {np.mean(rewards)}
    assert rows[0]["rl_weights"] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**20])
def test_max_rl_judges_rounding_by_the_size_of_the_rewards(scale):
    cancelling = credited(group(0.1 * scale, 0.2 * scale, -0.3 * scale), type="max_rl")
    assert advantages(cancelling) == [0, 0, 0] and baselines(cancelling)[0] > 0
    assert advantages(credited(group(2e-15 * scale, 0.0), type="max_rl")) == [1, -1]


def test_max_rl_does_not_divide_by_what_rounding_leaves():
    assert 0.1 - 0.7 * (1 / 7) > 0 == 0.3 - 0.7 * (3 / 7)
    shaping = {"max_tokens": 7, "buffer_tokens": 7, "penalty": 0.7}
    one, other = group(0.1, 0.3)
    traces = [one | {"num_output_tokens": 1}, other | {"num_output_tokens": 3}]
    assert advantages(credited(traces, type="max_rl", overlong=shaping)) == [0, 0]
    small = credited(group(1e-9, 0.0), type="max_rl")
    assert advantages(small) == pytest.approx([1, -1])


@pytest.mark.parametrize(("ulps", "counts"), [(10, False), (19, False), (21, True)])
def test_max_rl_takes_a_mean_within_ten_roundings_of_two_rewards_for_zero(ulps, counts):
    """Two members are rounded twice by their sum and up to eight times by shaping; each rounding is of 1 + 1 here."""
    eps = np.finfo(np.float64).eps
    rows = credited(group(1.0, -1.0 + 2 * ulps * eps), type="max_rl")
    assert [value != 0 for value in advantages(rows)] == [counts] * 2 and baselines(rows)[0] == ulps * eps


def test_reinforce_pp_has_one_scale_for_all_groups():
    rows = credited([*group(1.0, 0.0), *group(4.0, 0.0, group_id="g1")], type="reinforce_pp", epsilon=1e-9)
    # Less their means: 0.5, -0.5, 2, -2; the mean of the squares is (0.25 + 0.25 + 4 + 4) / 4 = 2.125.
    assert advantages(rows) == pytest.approx([each / 2.125**0.5 for each in (0.5, -0.5, 2, -2)])
    assert baselines(rows) == [0.5, 0.5, 2, 2]
    rows = credited(group(1.0, 0.0), type="reinforce_pp", epsilon=0.5)
    assert advantages(rows) == [0.5, -0.5]


@pytest.mark.parametrize(("over", "checked"), [("rollouts", 1), ("tokens", 0)])
def test_only_statistics_over_rollouts_leave_groups_that_add_up_to_zero(over, checked, monkeypatch):
    calls = []
    monkeypatch.setattr("tasks.advantage.stage.check_zero_sum", lambda *tables: calls.append(tables))
    credited(group(1.0, 0.0), type="reinforce_pp", statistics=over)
    assert len(calls) == checked


@pytest.mark.filterwarnings("error")
def test_reinforce_pp_over_tokens_of_which_there_are_none():
    messages = [*exchange("g0-0", completion=()), *exchange("g0-1", completion=())]
    rows = credited(group(1.0, 0.0), messages, type="reinforce_pp", statistics="tokens")
    assert advantages(rows) == [0.5, -0.5] and not any(sum(row["rl_weights"]) for row in rows)
    messages = [*exchange("g0-0"), message("g0-1", 0, tokens=())]
    rows = credited(group(1.0, 0.0), messages, type="reinforce_pp", statistics="tokens", epsilon=0.5)
    assert advantages(rows) == [0, -2], "all tokens are of the first"


LENGTHS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 6), st.sampled_from((0.0, 0.25, 1.0, None))), min_size=2, max_size=9
)


@settings(max_examples=25)
@given(LENGTHS)
def test_reinforce_pp_over_tokens_is_what_a_list_of_tokens_says(drawn):
    """The formula over one long list of tokens, each with the centred reward of its rollout, of ragged lengths.

    As verl's `compute_reinforce_plus_plus_baseline_outcome_advantage` (verl/trainer/ppo/core_algos.py), which has the
    sample deviation.
    """
    traces = [trace(f"t{i}", group_id=f"g{of}", reward=reward) for i, (of, _, reward) in enumerate(drawn)]
    messages = [row for i, (_, n, _) in enumerate(drawn) for row in exchange(f"t{i}", completion=range(n))]
    rewards = {of: [r for g, _, r in drawn if g == of and r is not None] for of, _, _ in drawn}
    centred = [None if r is None else r - sum(rewards[of]) / len(rewards[of]) for of, _, r in drawn]
    tokens = [value for value, (_, n, _) in zip(centred, drawn, strict=True) if value is not None for _ in range(n)]
    mean, spread = (statistics.fmean(tokens), statistics.pstdev(tokens)) if tokens else (0.0, 0.0)
    expected = [None if value is None else (value - mean) / (spread + 1e-6) for value in centred]
    rows = credited(traces, messages, type="reinforce_pp", statistics="tokens")
    if spread > 1e-9 or not tokens:  # else rounding over epsilon
        assert advantages(rows) == pytest.approx(expected, abs=1e-9)


def test_reinforce_pp_of_equal_rewards_divides_by_epsilon():
    assert advantages(credited(group(0.1, 0.1, 0.1), type="reinforce_pp")) == pytest.approx([0, 0, 0], abs=1e-9)


HIERARCHY = [
    trace(name, agent=agent, episode_id=episode, reward=reward, group_id=group_id)
    for name, agent, episode, reward, group_id in (
        ("s0", "solver", "e0", 1.0, "g0"),
        ("p0", "proposer", "e0", 1.0, "g0"),
        ("s1", "solver", "e1", 3.0, "g0"),
        ("s2", "solver", "e0", 0.0, "g0"),
        ("p1", "proposer", "e1", 0.0, "g0"),
        ("s3", "solver", "e1", 0.0, "g0"),
        ("s4", "solver", "e1", 0.0, "g0"),
        ("p2", "proposer", "e2", 8.0, "g1"),
    )
]


def test_hierarchical_grpo_compares_solvers_within_an_episode_and_proposers_within_the_group():
    rows = credited(HIERARCHY, type="hierarchical_grpo")
    assert {row["trace_id"]: (row["baseline"], row["advantage"]) for row in rows} == {
        "s0": (0.5, 0.5),
        "s2": (0.5, -0.5),
        "s1": (1, 2),
        "s3": (1, -1),
        "s4": (1, -1),
        "p0": (0.5, 0.5),
        "p1": (0.5, -0.5),
        "p2": (8, 0),
    }


def test_hierarchical_grpo_compares_all_of_an_agent_that_is_not_named():
    rows = credited(HIERARCHY[:-1], type="hierarchical_grpo", episode_agents=[])
    assert {row["baseline"] for row in rows if row["trace_id"].startswith("s")} == {0.8}
    rows = credited(HIERARCHY[:-1], type="hierarchical_grpo", episode_agents=["proposer", "solver"])
    assert [row["advantage"] for row in rows if row["trace_id"].startswith("p")] == [0, 0]


@pytest.mark.filterwarnings("error")  # nothing divided by zero on the way
@pytest.mark.parametrize("kind", SINGLE)
def test_a_group_of_one(kind):
    (row,) = credited(group(0.25), type=kind)
    alone = kind == "rloo"
    assert row["advantage"] == (None if alone else 0) and sum(row["rl_weights"]) == (0 if alone else 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [*SINGLE, "hierarchical_grpo"])
@pytest.mark.parametrize("shaping", [{}, {"length_penalty": {}, "overlong": {"max_tokens": 2, "buffer_tokens": 1}}])
def test_a_step_without_any_reward(kind, shaping):
    (row,) = credited(group(None), type=kind, **shaping)
    assert row["advantage"] is None and row["baseline"] is None and not any(row["rl_weights"])
    assert credited([], type=kind, **shaping) == []
