"""Laws of what compares groups: order, sums, scale."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.stages import credited
from tests.tasks.advantage.algorithms.steps import steps

SINGLE = ("grpo", "dr_grpo", "rloo", "max_rl", "reinforce_pp")
KINDS = (*SINGLE, "hierarchical_grpo")
LENGTHY = {"length_penalty": {}, "overlong": {"max_tokens": 10, "buffer_tokens": 6}}


def worth(step, kind, **section):
    """The advantage of every trace that has credits, by trace id."""
    rows = credited(step.traces, step.messages, step.verdicts, type=kind, **section)
    return {row["trace_id"]: row["advantage"] for row in rows}


def close(expected, *, rel=1e-9):
    """What is equal to these advantages up to rounding; None is none."""
    return {
        name: value if value is None else pytest.approx(value, rel=rel, abs=1e-9) for name, value in expected.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(data=st.data(), shaping=st.sampled_from(({}, LENGTHY)))
def test_the_order_of_rows_does_not_matter(kind, data, shaping):
    step = data.draw(steps(seats=kind == "hierarchical_grpo"))
    order = data.draw(st.permutations(range(len(step.traces))))
    assert worth(step.ordered(order), kind, **shaping) == close(worth(step, kind, **shaping))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(data=st.data(), shaping=st.sampled_from(({}, LENGTHY)))
def test_every_comparison_group_adds_up_to_zero(kind, data, shaping):
    step = data.draw(steps(seats=kind == "hierarchical_grpo"))
    found, sums, scale = worth(step, kind, **shaping), defaultdict(float), defaultdict(float)
    for row in step.kept:
        seat = (row["agent"], row["episode_id"]) if row["agent"] == "solver" else (row["agent"], "")
        sums[row["group_id"], *seat] += found[row["trace_id"]] or 0.0
        scale[row["group_id"], *seat] += abs(found[row["trace_id"]] or 0.0)
    assert all(abs(total) <= 1e-9 * (1 + scale[key]) for key, total in sums.items())


@settings(max_examples=8)
@given(step=steps(), shaping=st.sampled_from(({}, LENGTHY)))
def test_rloo_is_n_over_n_minus_1_times_grpo(step, shaping):
    grouped, leaving_out = worth(step, "grpo", **shaping), worth(step, "rloo", **shaping)
    rewarded = [row for row in step.kept if row["reward"] is not None]
    for row in step.kept:
        size = sum(one["group_id"] == row["group_id"] for one in rewarded)
        expected = grouped[row["trace_id"]]
        if size > 1 and expected is not None:
            expected *= size / (size - 1)
        assert leaving_out[row["trace_id"]] == (None if size == 1 or expected is None else pytest.approx(expected))


@settings(max_examples=8)
@given(step=steps(), shaping=st.sampled_from(({}, LENGTHY)))
def test_dr_grpo_is_grpo_and_so_is_hierarchical_grpo_of_one_agent_over_the_group(step, shaping):
    assert worth(step, "grpo", **shaping) == worth(step, "dr_grpo", **shaping)
    assert worth(step, "grpo", **shaping) == worth(step, "hierarchical_grpo", **shaping)


@settings(max_examples=8)
@given(step=steps(), scale=st.sampled_from((1e-3, 0.5, 3.0, 1e6)))
def test_max_rl_does_not_depend_on_the_unit_of_rewards(step, scale):
    assert worth(step.rewarded(lambda reward: reward * scale), "max_rl") == close(worth(step, "max_rl"))


@settings(max_examples=8)
@given(step=steps(), scale=st.sampled_from((0.5, 3.0, 100.0)), shift=st.sampled_from((-7.0, 0.0, 2.5)))
def test_reinforce_pp_does_not_depend_on_the_unit_of_rewards_nor_on_their_zero(step, scale, shift):
    changed = step.rewarded(lambda reward: reward * scale + shift)
    found, expected = (worth(each, "reinforce_pp", epsilon=1e-12) for each in (changed, step))
    if any(value is not None and abs(value) > 1e-2 for value in expected.values()):  # else rounding over rounding
        assert found == close(expected, rel=1e-6)


@settings(max_examples=8)
@given(step=steps(), scale=st.sampled_from((0.5, 3.0, 100.0)), shift=st.sampled_from((-7.0, 0.0, 2.5)))
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_what_divides_by_nothing_scales_with_the_rewards(kind, step, scale, shift):
    changed = worth(step.rewarded(lambda reward: reward * scale + shift), kind)
    expected = {name: value if value is None else value * scale for name, value in worth(step, kind).items()}
    assert changed == close(expected)


@settings(max_examples=8)
@given(step=steps(), kind=st.sampled_from(SINGLE))
def test_where_nothing_passes_length_is_no_matter(step, kind):
    assert worth(step, kind, length_penalty={"passing": 3.5}) == worth(step, kind)
