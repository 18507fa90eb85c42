"""Shaping by hand: the length penalty relative to the group, and DAPO's punishment near the limit."""

import pytest

from tasks.advantage.stage import STAGE
from tests.fixtures.builders import view
from tests.fixtures.stages import advantages, credited, group


def of_lengths(rewards, outputs):
    """A group of these rewards and numbers of sampled tokens, without a prompt and turns."""
    traces = group(*rewards, num_input_tokens=0, num_turns=0)
    return [row | {"num_output_tokens": output} for row, output in zip(traces, outputs, strict=True)]


def test_the_length_penalty_by_hand():
    inputs_and_turns = ((5, 1), (0, 2), (5, 2), (10, 4))
    traces = [
        row | {"num_input_tokens": inputs, "num_turns": turns}
        for row, (inputs, turns) in zip(
            of_lengths((1.0, 1.0, 0.0, 0.0), (10, 20, 40, 30)), inputs_and_turns, strict=True
        )
    ]
    rows = credited(traces, length_penalty={}, type="grpo")
    # Half of them pass. 0.25 * output / 40 + 0.1 * input / 10 + 0.1 * turns / 4, halved:
    penalties = [
        (0.0625 + 0.05 + 0.025) / 2,
        (0.125 + 0.0 + 0.05) / 2,
        (0.25 + 0.05 + 0.05) / 2,
        (0.1875 + 0.1 + 0.1) / 2,
    ]
    worth = [reward - penalty for reward, penalty in zip((1, 1, 0, 0), penalties, strict=True)]
    mean = sum(worth) / 4
    assert [row["baseline"] for row in rows] == pytest.approx([mean] * 4)
    assert advantages(rows) == pytest.approx([each - mean for each in worth])
    assert [row["reward"] for row in rows] == [1, 1, 0, 0]


def test_a_full_reward_passes_whatever_rounding_made_of_it():
    full = 0.7 + 0.2 + 0.1
    assert full < 1.0
    traces = [of_lengths((reward, reward), (2, 4)) for reward in (full, 1.0)]
    almost, passes = (credited(rows, type="grpo", length_penalty={})[0]["baseline"] for rows in traces)
    assert almost - full == pytest.approx(passes - 1.0) and passes - 1.0 < -0.1


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0), (79, 0), (80, 0), (81, 0.025), (90, 0.25), (99, 0.475), (100, 0.5), (1000, 0.5)]
)
def test_overlong_rises_over_the_buffer(tokens, expected):
    section = {"max_tokens": 100, "buffer_tokens": 20, "penalty": 0.5}
    (row,) = credited(of_lengths((2.0,), (tokens,)), type="grpo", overlong=section)
    assert row["baseline"] == pytest.approx(2 - expected) and row["reward"] == 2


def test_shaping_that_is_off_is_the_same_as_none():
    plain, off = (view(STAGE, algorithm={"type": "rloo"} | each) for each in ({}, {"overlong": None}))
    assert plain.content() == off.content()
    assert "length_penalty" in view(STAGE, algorithm={"type": "rloo", "length_penalty": {}}).content()["algorithm"]
