"""Advantage: baselines by hand, invariants that stop the stage, tokens of forks trained exactly once."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.advantage.algorithms import ALGORITHMS
from tasks.advantage.algorithms.credit import AdvantageBreach, Credit
from tasks.advantage.stage import check_zero_sum
from tests.fixtures.builders import failed, message, table
from tests.fixtures.stages import advantages, credited, group


def test_grpo_by_hand():
    rows = credited(group(1.0, 1.0, 0.0, 0.0))
    assert advantages(rows) == [0.5, 0.5, -0.5, -0.5]
    assert {row["baseline"] for row in rows} == {0.5}
    assert rows[0]["sample_id"] == "g0-0/0" and rows[0]["path"] == [0, 1] and rows[0]["num_tokens"] == 5
    assert rows[0]["rl_weights"] == [0, 0, 0, 1, 1] and rows[0]["advantages"] == [0, 0, 0, 0.5, 0.5]
    assert rows[0]["ce_weights"] == rows[0]["ref_kl_weights"] == [0, 0, 0, 0, 0]


def test_rloo_by_hand():
    rows = credited(group(1.0, 1.0, 0.0, 0.0), type="rloo")
    assert advantages(rows) == pytest.approx([2 / 3, 2 / 3, -2 / 3, -2 / 3])
    assert [row["baseline"] for row in rows] == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3])
    assert rows[0]["rl_weights"] == [0, 0, 0, 1, 1]


def test_equal_rewards_divide_by_epsilon_and_not_by_zero():
    assert advantages(credited(group(0.1, 0.1, 0.1), type="grpo", normalise_std=True)) == pytest.approx([0.0] * 3)


def test_large_rewards_with_a_small_spread_still_add_up():
    rows = credited(group(1e9, 1e9 + 1e-6, 1e9 + 2e-6), type="grpo", normalise_std=True)
    assert sum(advantages(rows)) == pytest.approx(0, abs=1e-9) and rows[2]["advantage"] > 0.5


def test_supervised_weighs_masked_tokens_and_has_no_advantage():
    rows = credited(group(None, 0.3), type="supervised")
    assert rows[0]["ce_weights"] == [0, 0, 0, 1, 1] and rows[0]["rl_weights"] == [0] * 5
    assert advantages(rows) == [None, None] and rows[1]["baseline"] is None and rows[1]["reward"] == 0.3


@settings(max_examples=25)
@given(data=st.data(), size=st.integers(1, 9))
def test_every_sampled_token_of_any_graph_is_trained_exactly_once(data, size):
    messages = []
    for number in range(size):
        parent = data.draw(st.none() | st.integers(0, number - 1)) if number else None
        sampled, length = data.draw(st.booleans()), data.draw(st.integers(0, 3))
        messages.append(message("g0-0", number, parent=parent, tokens=[1] * length, sampled=sampled))
    rows = credited(group(None), messages, type="supervised")
    sampled = sum(len(row["token_ids"]) for row in messages if row["sampled"])
    assert sum(sum(row["ce_weights"]) for row in rows) == sampled


def test_nothing_kept_gives_no_credits():
    assert credited([failed("a")]) == [] == credited([])


def test_an_algorithm_that_lets_an_outsider_into_a_group_stops_the_stage(monkeypatch):
    grpo = ALGORITHMS["grpo"]

    def generous(kept, settings):
        credit = grpo.credit(kept, settings)
        return replace(credit, advantage=credit.advantage + 0.25)

    monkeypatch.setitem(ALGORITHMS, "grpo", replace(grpo, credit=generous))
    with pytest.raises(AdvantageBreach, match=r"group g0 adds up to 0\.5"):
        credited(group(1.0, 0.0))
    monkeypatch.setitem(ALGORITHMS, "grpo", replace(grpo, credit=generous, zero_sum=False))
    assert advantages(credited(group(1.0, 0.0))) == [0.75, -0.25]


def test_advantages_of_a_group_add_up_to_zero_up_to_rounding_of_what_is_added_up():
    traces = table("traces", group(1.0, 0.0))
    stream = np.zeros(0, np.float32)

    def of(*advantage):
        return Credit(np.zeros(2), np.array(advantage), stream, stream, stream)

    for fine in ((0.5, -0.5), (1e6, -1e6 + 5e-4), (0.5e-9, 0.0)):
        check_zero_sum(traces, of(*fine))
    for wrong, total in (((0.5, -0.4), "0.1"), ((1e6, -1e6 + 5e-3), "0.005"), ((1.5e-9, 0.0), "1.5e-09")):
        with pytest.raises(AdvantageBreach, match=rf"group g0 adds up to {re.escape(total)}"):
            check_zero_sum(traces, of(*wrong))
