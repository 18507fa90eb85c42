"""From rewards to the weight of each token, as prime-rl, TRL and verl have it: their formulas over any recorded step.

A token's loss is its advantage here, as at a ratio of 1; what is compared is the sum over the step, so that advantages
and denominators are both right or both seen to be wrong. Prime-rl is that of 559b447, verl of 1dda039, TRL of f2cd577.
"""

from collections import defaultdict
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.filtering.stage import STAGE as FILTERING
from tests.fixtures.builders import exchange, trace, view
from tests.fixtures.stages import advantage, filtering, packed, tables_of

STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 6), st.sampled_from((0.0, 0.25, 0.5, 1.0))), min_size=1, max_size=16
)
"""Group, sampled tokens, reward; rewards are in quarters, of which means of two or four are exact."""
LENGTH = 5
"""Of `dr_grpo`: the longest completion is longer."""


def ours(step, algorithm, filters, **section):
    """The sum of weight times advantage, without its sign, divided as the learner divides it; 0 without any token."""
    traces = [trace(f"t{i}", group_id=f"g{of}", reward=reward) for i, (of, _, reward) in enumerate(step)]
    messages = [row for i, (_, n, _) in enumerate(step) for row in exchange(f"t{i}", completion=range(n))]
    sections = {"algorithm": algorithm, "filtering": {"filters": [{"type": "errored"}, *filters]}}
    tables = tables_of(traces, messages)
    tables |= filtering(tables, view(FILTERING, **sections))
    tables |= advantage(tables, view(ADVANTAGE, **sections))
    rows = packed(tables, sections, **section)
    pairs = [pair for row in rows for pair in zip(row["rl_weights"], row["advantages"], strict=True)]
    # Absolute values: of a group of equal lengths the plain sum is zero, whatever the denominator.
    return sum(weight * abs(worth) for weight, worth in pairs) / rows[0]["rl_tokens"] if rows else 0.0


def centred(step):
    """Sampled tokens, and how far the reward is from the mean of the group, by rollout."""
    rewards = defaultdict(list)
    for of, _, reward in step:
        rewards[of].append(reward)
    return [(n, abs(reward - fmean(rewards[of]))) for of, n, reward in step]


DROPPED = [{"type": "zero_advantage"}]


@settings(max_examples=40)
@given(STEPS, st.sampled_from(([], DROPPED)))
def test_dr_grpo_divides_as_trl_does(step, filters):
    """trl/trainer/grpo_trainer.py, line 3135: by the rollouts of the batch times a constant, whatever a filter did."""
    total = sum(n * worth for n, worth in centred(step))
    found = ours(step, {"type": "dr_grpo", "length_normaliser": LENGTH}, filters)
    assert found == pytest.approx(total / (len(step) * LENGTH), rel=1e-6, abs=1e-9)


@settings(max_examples=40)
@given(STEPS)
def test_token_means_are_those_of_verl_and_trl_where_nothing_is_left_out(step):
    """`token-mean` in verl/trainer/ppo/core_algos.py, `agg_loss`; `dapo` in trl/trainer/grpo_trainer.py, line 3141."""
    total = sum(n * worth for n, worth in centred(step))
    found = ours(step, {"type": "grpo"}, [], zero_advantages=True)
    assert found == pytest.approx(total / sum(n for _, n, _ in step), rel=1e-6, abs=1e-9)


@settings(max_examples=40)
@given(STEPS, st.sampled_from(([], DROPPED)))
def test_tokens_without_an_advantage_are_left_out_as_in_prime_rl(step, filters):
    """`_prune_zero_advantages` in src/prime_rl/orchestrator/train_sink.py; groups of equal rewards come to the same."""
    pairs = [(n, worth) for n, worth in centred(step) if worth > 1e-12]
    expected = sum(n * worth for n, worth in pairs) / max(sum(n for n, _ in pairs), 1)
    # A mean of three or more is rounded: what is left of zero there counts in both, and is told apart here.
    if all(worth > 1e-12 or worth == 0 for _, worth in centred(step)):
        assert ours(step, {"type": "grpo"}, filters) == pytest.approx(expected, rel=1e-6, abs=1e-9)
